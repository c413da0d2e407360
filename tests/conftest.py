"""How the suite runs on many ranks: every rank runs pytest on the tests marked ``mpi``, in the same order.

A test that fails on one rank leaves the others waiting, so the run ends at the first failure (``-x``), the whole job is
aborted, and a test that waits longer than its time limit ends the job with every thread's stack.
"""

import collections
import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from torchmpi_py.launch import variables

os.environ["TORCHMPI_TUNING_DIR"] = os.devnull  # what someone measured on this machine is not what is tested
_SHORT_PROGRAMS = Path(__file__).with_name("short_programs")
_hidden: io.StringIO | None = None
_DUMP_SECONDS = 2.0  # so much earlier than pytest-timeout, which ends the process, each rank shows its stacks
_timer: threading.Timer | None = None
_stderr: int | None = None  # the standard error of a rank, which pytest captures in a test


def pytest_addoption(parser):
    text = "Spare full collections of garbage in the programs that tests start; see tests/short_programs."
    parser.addoption("--short-programs", action="store_true", help=text)
    parser.addoption(
        "--all", action="store_true", help="Run the tests marked slow as well, as scripts/test --all does."
    )


def _start_short_programs() -> None:
    """Let each Python that a test starts import ``short_programs/sitecustomize.py``."""
    paths = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_SHORT_PROGRAMS), *([paths] if paths else [])])


def _give_temporary_folder() -> None:
    """One for each rank: in a common one they fall over each other when pytest removes those of former runs."""
    common = os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = os.path.join(common, f"pytest-ranks-{os.getuid()}", str(variables.rank_in(os.environ)))
    os.makedirs(folder, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Rank 0 reports; the others are heard only when they fail."""
    global _hidden, _stderr
    config.addinivalue_line("markers", "mpi(min_size): runs on several ranks")
    config.addinivalue_line("markers", "slow: runs with --all, or when it is named")
    if config.getoption("--only-mpi"):
        _give_temporary_folder()
        _stderr = os.dup(2)
        faulthandler.register(signal.SIGUSR2, file=_stderr)  # also in children that are forked from now on
    elif config.getoption("--short-programs"):
        _start_short_programs()
    if (variables.rank_in(os.environ) or 0) > 0 and config.getoption("--only-mpi"):
        _hidden = io.StringIO()
        config.pluginmanager.getplugin("terminalreporter")._tw._file = _hidden


def pytest_ignore_collect(collection_path, config):
    """Leave out the modules without tests for several ranks: each rank would take seconds to collect them."""
    if config.getoption("--only-mpi") and collection_path.match("test_*.py"):
        return "mark.mpi" not in collection_path.read_text(encoding="utf-8") or None
    return None


def _is_named(item, config):
    """Whether an argument names the test itself, and not only its file or folder."""
    return any("::" in argument and item.nodeid.startswith(argument) for argument in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out the tests that are not for this run, of one process or of many: to skip thousands takes long."""
    wanted = [item for item in items if (item.get_closest_marker("mpi") is not None) == config.getoption("--only-mpi")]
    if wanted:  # else they are skipped, which is no failure
        if not config.getoption("--all"):
            wanted = [item for item in wanted if not item.get_closest_marker("slow") or _is_named(item, config)]
        chosen = set(wanted)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = wanted


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_stays():
    """A collection of garbage looks at what the tests of a module make alone, in a hundredth of the time."""
    gc.collect()
    gc.freeze()


def _show_stacks() -> None:
    """The stacks of this process, and of its children: a rank may wait for a worker of a data loader."""
    faulthandler.dump_traceback(_stderr)
    for child in multiprocessing.active_children():
        os.write(_stderr, f"Stacks of the child {child.name}, process {child.pid}:\n".encode())
        os.kill(child.pid, signal.SIGUSR2)
        child.join(0.2)  # so that they do not write at the same time


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """Show every rank's stacks when a test has hung: pytest-timeout's own would go where a hidden rank reports."""
    global _timer
    if _stderr is not None:  # a thread of Python's: a forked child would wait for one of faulthandler's
        seconds = settings.timeout - min(_DUMP_SECONDS, settings.timeout / 2)
        _timer = threading.Timer(seconds, _show_stacks)
        _timer.daemon = True
        _timer.start()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item):
    if _timer is not None:
        _timer.cancel()


def pytest_terminal_summary(terminalreporter):
    """Show where the time of a run was spent: the seconds of each folder."""
    seconds = collections.Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds["/".join(report.nodeid.partition("::")[0].split("/")[:2])] += report.duration
    shares = ", ".join(f"{folder} {value:.0f}" for folder, value in seconds.most_common() if value >= 1)
    terminalreporter.write_line(f"seconds by folder: {shares or 'less than 1 each'}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """After a failure: show it, and end the job instead of waiting for ranks that wait for this one."""
    if getattr(config, "exit_status", 0) == 0:
        return
    if _hidden is not None:
        sys.stderr.write(_hidden.getvalue())
    from torchmpi_py.watch import abort

    abort.abort(1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    session.config.exit_status = 0 if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED else int(exitstatus)


@pytest.fixture
def full_collections(monkeypatch):
    """Programs that the test starts collect garbage as ever, also at their end: for tests of how things end."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path != str(_SHORT_PROGRAMS)))


@pytest.fixture(scope="session")
def mpi(request):
    """The started package, at whatever number of ranks this run has."""
    import torchmpi_py

    torch.set_num_threads(1)
    torchmpi_py.start()
    yield torchmpi_py
    if not request.session.testsfailed:  # stop() would wait for ranks that wait for this one
        torchmpi_py.stop()


@pytest.fixture
def rank(mpi):
    """That of this process in ``mpi``."""
    return mpi.rank()


@pytest.fixture
def me(rank):
    """The same, where any rank is called ``rank``."""
    return rank


@pytest.fixture
def size(mpi):
    """The number of all ranks."""
    return mpi.size()


@pytest.fixture
def selector():
    """The selector in use; the test may change its rows, which come back."""
    from torchmpi_py.collectives.selector import selector as used

    rows, source = {key: used[key] for key in used}, used.source
    yield used
    used.load(rows, source)
