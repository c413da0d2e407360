"""Every file that the package opens at a path where another user may have put something else, with all of that.

A place is refused with an error that names the path and the reason, or is ignored with a warning where it is a cache.
Nothing waits, no code of a file runs, and what is there stays there.
"""

import csv
import importlib
import logging
import os
import types

import foreign_files
import pytest

from torchmpi_py.bench import UsageError, results, timeline_calls, trace
from torchmpi_py.collectives import measured_cache
from torchmpi_py.collectives.flavours import gpu_probe
from torchmpi_py.engine import checkpoint_files
from torchmpi_py.launch import __main__ as torchmpirun, parameter_files, terminal, wrap
from torchmpi_py.sweeps.ledger import Ledger
from torchmpi_py.sweeps.outcome import Experiment, Results
from torchmpi_py.watch import tracing

experiments = importlib.import_module("torchmpi_py.sweeps.experiments")  # the package's name is the function

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user"),
]

_FACTS = measured_cache.MachineFacts("MPI 1", "host", "2x1", "cpu")
_GPU_FACTS = gpu_probe.GpuFacts("MPI 1", "library", "", "2.10", "host", "gpu")
_ROW = Experiment(0, {"lr": 0.1}, "finished", 1.0, "", 1.0, 0.0, 0, 0, "log")


def seen(path):
    """What there is to see of a file without opening it."""
    found = os.lstat(path)
    return found.st_ino, found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns


def _sweep(folder):
    """A run of a sweep in a folder."""
    ledger = Ledger(folder, "first", 0)
    ledger.prepare([1, 2], 0, resume=True)
    return ledger


# --- what is read. Each function reads the file that the first of its values names in an empty folder.


def sweep(folder):
    Ledger(folder, "second", 0).prepare([1, 2], 0, resume=True)


def end_of_an_experiment(folder):
    _sweep(folder / "..").results()


def reports_of_an_experiment(folder):
    _sweep(folder / "..").reports()


def tuning(folder):
    assert measured_cache._find(_FACTS) is None


def gpu_verdict(folder):
    assert gpu_probe.read(_GPU_FACTS) is None


def dump_of_a_hang(folder):
    timeline_calls.load(folder)


def board(folder):
    timeline_calls.read(folder, {})


def trace_of_a_rank(folder):
    trace.load(folder)


def report_of_the_bench(folder):
    results.load(folder / "report.json")


def summary_of_a_checkpoint(folder):
    checkpoint_files.summary_of(folder)


def parts_of_a_checkpoint(folder):
    checkpoint_files.read(folder / "model.pt")


READS = {
    sweep: "torchmpi-sweep",
    end_of_an_experiment: "ended-0000",
    reports_of_an_experiment: "reports-0000",
    tuning: _FACTS.path().name,
    gpu_verdict: _GPU_FACTS.path().name,
    dump_of_a_hang: "flight_recorder_0",
    board: "node-0.json",
    trace_of_a_rank: "rank-0.json",
    report_of_the_bench: "report.json",
    summary_of_a_checkpoint: "checkpoint.json",
    parts_of_a_checkpoint: "model.pt",
}


@pytest.mark.parametrize("make", foreign_files.ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_reads(tmp_path, monkeypatch, caplog, read, make):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / READS[read]
    if read in (end_of_an_experiment, reports_of_an_experiment):
        _sweep(folder)
        folder = folder / "inside"  # whose parent is the sweep's
        folder.mkdir()
    make(path)
    if make is foreign_files.code and read in (sweep, end_of_an_experiment):
        os.chown(path, foreign_files.STRANGER, -1)  # the user's own pickles may hold any object
    before = seen(path)
    monkeypatch.setenv("TORCHMPI_TUNING_DIR", str(path.parent))
    caplog.set_level(logging.WARNING)
    text = ""
    try:
        read(folder)
    except Exception as error:
        text = f"{error} {getattr(error, 'filename', '')}"
    text += caplog.text
    if not (read is reports_of_an_experiment and make in foreign_files.BAD_CONTENT):  # an unfinished line is left out
        assert path.name in text or str(tmp_path) in text
    assert seen(path) == before
    assert not (path.parent / "ran").exists()


def test_plain_data_of_a_colleague(tmp_path):
    """In a folder that the user has named; a sweep's files are of the user alone, for they are pickles."""
    checkpoint_files.write(tmp_path / "model.pt", {"a": 1})
    (tmp_path / "report.json").write_text("{}")
    for path in tmp_path.iterdir():
        os.chown(path, foreign_files.STRANGER, -1)
    assert checkpoint_files.read(tmp_path / "model.pt") == {"a": 1}
    with pytest.raises(UsageError, match="'format'"):  # which is of the content
        results.load(tmp_path / "report.json")


# --- what is written, created, replaced or removed


def log_of_a_rank(folder):
    wrap.log_to(folder, 0)


def log_in_torchmpirun(folder):
    torchmpirun.check_folder("--log-dir", folder, replaced="rank-0.log")


def log_of_an_experiment(folder):
    with experiments._output_to(folder / "0000.log"):
        os.write(1, b"output")


def report_to_a_sweep(folder):
    Ledger(folder, "first", 0).add_report(0, 1, 0.5)


def new_sweep(folder):
    Ledger(folder, "first", 0).prepare([1], 0, resume=False)


def claim(folder):
    ledger = Ledger(folder, "first", 0)
    ledger.configurations = [1]
    (folder / "claims-first").mkdir()
    assert ledger.claim() == 0


def copy_of_the_table(folder):
    experiments._open(types.SimpleNamespace(), [], 0, True, folder / "copy.csv")


def part_of_the_table(folder):
    Results([_ROW]).to_csv(folder / "results.csv")


def trace_page(folder):
    trace_file = tracing.Trace.__new__(tracing.Trace)
    trace_file.path, trace_file._is_written = folder / "rank-0.json", False
    trace_file.events, trace_file.readings, trace_file._profiler = [], [tracing.Reading(0, 0, 0)], None
    trace_file.world, trace_file.job = types.SimpleNamespace(rank=0, size=1), 0
    trace_file.write()


def measured(folder):
    measured_cache.write(_FACTS.path(), _FACTS, {})


WRITES = {
    log_of_a_rank: "rank-0.log",
    log_in_torchmpirun: "rank-0.log",
    log_of_an_experiment: "0000.log",
    report_to_a_sweep: "reports-0000",
    new_sweep: "torchmpi-sweep",
    claim: "0000.log",
    copy_of_the_table: "copy.csv",
    part_of_the_table: f"results.csv.{os.getpid()}.part",
    trace_page: "rank-0.part",
    measured: _FACTS.path().name,
}
REPLACES = (log_in_torchmpirun, new_sweep, claim, measured)
"""By a new file: only what belongs to another user is refused."""


@pytest.mark.parametrize("make", [*foreign_files.NOT_OURS, *foreign_files.NOT_FILES], ids=lambda make: make.__name__)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes(tmp_path, monkeypatch, caplog, write, make):
    path = tmp_path / WRITES[write]
    make(path)
    monkeypatch.setenv("TORCHMPI_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(experiments.chief, "is_chief", lambda: True)
    monkeypatch.setattr(experiments, "_on_all_ranks", lambda step, what: [step()])
    before, text = seen(path), ""
    try:
        write(tmp_path)
    except (Exception, SystemExit) as error:
        text = f"{error} {getattr(error, 'filename', '')}"
    text += caplog.text
    if make in foreign_files.NOT_OURS or write not in REPLACES:
        assert path.name in text
        assert seen(path) == before
    if make is foreign_files.link:
        assert (tmp_path / "elsewhere").read_text() == "untouched"


def test_a_log_that_rank_0_does_not_write(tmp_path):
    """torchmpirun shows rank 0's log: not what a planted link leads to, and it does not wait at a pipe."""
    for make in (*foreign_files.NOT_OURS, *foreign_files.NOT_FILES):
        folder = tmp_path / make.__name__
        folder.mkdir()
        tail = terminal.Tail.__new__(terminal.Tail)
        tail.log, tail._num_read = folder / "rank-0.log", 0
        make(tail.log)
        assert tail._next_output() == b""


def test_a_parameter_file_that_is_a_pipe(tmp_path):
    for make in (foreign_files.pipe, foreign_files.device, foreign_files.directory, foreign_files.huge):
        make(tmp_path / make.__name__)
        environment = {"OMPI_MCA_mca_base_param_files": str(tmp_path / make.__name__)}
        assert not parameter_files.have("no_such_parameter", "openmpi", environment)


def test_cells_of_a_spreadsheet(tmp_path):
    row = Experiment(0, {"=a": "=1+1", "b": -0.5, "c": "-2e3"}, "failed", None, "@x\n+y", 1.0, 0.0, 0, 0, "log")
    Results([row]).to_csv(tmp_path / "results.csv")
    with open(tmp_path / "results.csv", newline="") as file:
        names, cells = csv.reader(file)
    found = dict(zip(names, cells, strict=True))
    assert (found["'=a"], found["b"], found["c"], found["error"]) == ("'=1+1", "-0.5", "-2e3", "'@x\n+y")
