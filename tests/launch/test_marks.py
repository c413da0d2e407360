"""A rank that does not end in order leaves its mark; one that does removes it, however it does."""

import os
import subprocess
import sys

import pytest

from torchmpi_py.launch import exit_marks

pytestmark = pytest.mark.timeout(240)

RANK = """
import atexit, contextlib, os, sys
from torchmpi_py.launch import exit_marks as marks
with marks.running(sys.argv[1], 3):
    exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("text", "is_left"),
    [
        ("sys.exit(0)", False),
        ("if os.fork() == 0: os._exit(7)\nos.wait()", False),
        ("atexit.register(os._exit, 0)", False),
        ("os.execvp('true', ['true'])", False),
        ("os._exit(0)", True),
        ("if os.fork() == 0: sys.exit(0)\nos.wait(); os._exit(0)", True),
        ("atexit.register(os._exit, 3)", True),
        ("atexit.register(os.kill, os.getpid(), 9)", True),
        ("with contextlib.suppress(OSError): os.execvp('/no/such', ['x'])\nos._exit(0)", True),
    ],
)
def test_the_mark(tmp_path, text, is_left):
    subprocess.run([sys.executable, "-c", RANK, tmp_path, text], check=False, timeout=200)
    assert exit_marks.is_running(tmp_path, 3) == is_left
    assert os.path.exists(tmp_path / "alive-3")
