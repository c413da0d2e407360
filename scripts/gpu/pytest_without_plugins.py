"""Stands in for what the tests use of pytest-mpi and pytest-timeout, where they cannot be installed.

``--only-mpi`` runs the tests marked ``mpi``, of those with ``min_size`` the ones that have ranks enough. A test that
takes longer than the ``timeout`` of its mark or of the configuration ends the process with every thread's stack. For a
plugin that is installed nothing is done.
"""

import faulthandler
import importlib.util
import os

import pytest

from torchmpi_py.launch import variables

_STDERR = os.dup(2)  # the real one: during tests pytest has its own in the place
_HAS_MPI, _HAS_TIMEOUT = (importlib.util.find_spec(name) is not None for name in ("pytest_mpi", "pytest_timeout"))


def pytest_addoption(parser):
    """The options and settings of the plugins that are missing."""
    if not _HAS_MPI:
        parser.addoption("--only-mpi", action="store_true", help="run the tests marked mpi")
    if not _HAS_TIMEOUT:
        parser.addini("timeout", "seconds that a test may take")
        parser.addini("timeout_method", "not used")


def pytest_configure(config):
    """Their marks."""
    config.addinivalue_line("markers", "mpi(min_size): runs on several ranks")
    config.addinivalue_line("markers", "timeout(seconds): the test may take so long")


def pytest_collection_modifyitems(config, items):
    """Skip what is not for this run."""
    if _HAS_MPI:
        return
    num_ranks = variables.size_in(os.environ) or 1
    for item in items:
        mark, is_wanted = item.get_closest_marker("mpi"), config.getoption("--only-mpi")
        if (mark is not None) != is_wanted:
            item.add_marker(pytest.mark.skip(reason="marked mpi" if mark is not None else "not marked mpi"))
        elif mark is not None and num_ranks < mark.kwargs.get("min_size", 1):
            item.add_marker(pytest.mark.skip(reason=f"needs {mark.kwargs['min_size']} ranks"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test under its time limit."""
    if _HAS_TIMEOUT:
        return (yield)
    mark = item.get_closest_marker("timeout")
    seconds = float(mark.args[0] if mark is not None and mark.args else item.config.getini("timeout") or 0)
    if seconds > 0:
        faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
