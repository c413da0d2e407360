"""What the trials share."""

import subprocess
import sys

import harness
import pytest
from trials import judge, pytest_terminal_summary  # noqa: F401


@pytest.fixture(scope="module")
def nursery(request, tmp_path_factory):
    """The path of the socket that makes ranks, which have imported the ``IMPORTS`` of the test module."""
    path = tmp_path_factory.mktemp("nursery") / "socket"
    imports = getattr(request.module, "IMPORTS", ())
    line = [sys.executable, str(harness.HERE / "nursery.py"), "serve", str(path), *imports]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ready\n"
        yield path
        server.kill()
