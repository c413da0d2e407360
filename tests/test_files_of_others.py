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

from torchmpi_py.bench import UsageError, results, timeline_calls
from torchmpi_py.collectives import measured_cache
from torchmpi_py.collectives.flavours import gpu_probe
from torchmpi_py.engine import Checkpoints
from torchmpi_py.launch import checks, parameter_files, terminal, wrap
from torchmpi_py.sweeps.ledger import Ledger
from torchmpi_py.sweeps.outcome import Experiment, Results
from torchmpi_py.watch import tracing

experiments = importlib.import_module("torchmpi_py.sweeps.experiments")  # the package's name is the function

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")]

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


# What is read: the file, and what reads it in an empty folder; what is of a sweep reads in a folder inside the sweep's.
READS = {
    "sweep": ("torchmpi-sweep", lambda folder: Ledger(folder, "second", 0).prepare([1, 2], 0, resume=True)),
    "end of an experiment": ("ended-0000", lambda folder: _sweep(folder / "..").results()),
    "reports of an experiment": ("reports-0000", lambda folder: _sweep(folder / "..").reports()),
    "tuning": (_FACTS.path().name, lambda folder: measured_cache._find(_FACTS)),
    "verdict on GPUs": (_GPU_FACTS.path().name, lambda folder: gpu_probe.read(_GPU_FACTS)),
    "dump of a hang": ("flight_recorder_0", timeline_calls.load),
    "board": ("node-0.json", lambda folder: timeline_calls.read(folder, {})),
    "report of the bench": ("report.json", lambda folder: results.load(folder / "report.json")),
    "checkpoint": ("step-000001.pt", lambda folder: Checkpoints(folder).load()),
}


@pytest.mark.parametrize("make", foreign_files.ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("what", READS)
def test_reads(tmp_path, monkeypatch, caplog, what, make):
    name, read = READS[what]
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / name
    if "of an experiment" in what:
        _sweep(folder)
        folder = folder / "inside"  # whose parent is the sweep's
        folder.mkdir()
    make(path)
    if make is foreign_files.code and what in ("sweep", "end of an experiment"):
        os.chown(path, foreign_files.STRANGER, -1)  # the user's own pickles may hold any object
    before = seen(path)
    monkeypatch.setenv("TORCHMPI_TUNING_DIR", str(path.parent))
    caplog.set_level(logging.WARNING)
    text = ""
    try:
        found = read(folder)
        assert found is None or what not in ("tuning", "verdict on GPUs")
    except (Exception, SystemExit) as error:
        text = f"{error} {getattr(error, 'filename', '')}"
    text += caplog.text
    if not (what == "reports of an experiment" and make in foreign_files.BAD_CONTENT):  # it leaves out unfinished lines
        assert path.name in text or str(tmp_path) in text
    assert seen(path) == before
    assert not (path.parent / "ran").exists()


def test_plain_data_of_a_colleague(tmp_path):
    """In a folder that the user has named; a sweep's files are of the user alone, for they are pickles."""
    Checkpoints(tmp_path).save(1, {"a": 1})
    (tmp_path / "report.json").write_text("{}")
    for path in tmp_path.iterdir():
        os.chown(path, foreign_files.STRANGER, -1)
    assert Checkpoints(tmp_path).load().parts == {"a": 1}
    with pytest.raises(UsageError, match="'format'"):  # which is of the content
        results.load(tmp_path / "report.json")


# --- what is written, created, replaced or removed


def log_of_an_experiment(folder):
    with experiments._output_to(folder / "0000.log"):
        os.write(1, b"output")


def claim(folder):
    ledger = Ledger(folder, "first", 0)
    ledger.configurations = [1]
    (folder / "claims-first").mkdir()
    assert ledger.claim() == 0


def trace_page(folder):
    trace_file = tracing.Trace.__new__(tracing.Trace)
    trace_file.path, trace_file._is_written = folder / "rank-0.json", False
    trace_file.events, trace_file.readings, trace_file._profiler = [], [tracing.Reading(0, 0, 0)], None
    trace_file.world, trace_file.job = types.SimpleNamespace(rank=0, size=1), 0
    trace_file.write()


# The file, and what writes it. What is replaced gets a new file: only what belongs to another user is refused.
WRITES = {
    "log of a rank": ("rank-0.log", lambda folder: wrap.log_to(folder, 0)),
    "log of an experiment": ("0000.log", log_of_an_experiment),
    "report to a sweep": ("reports-0000", lambda folder: Ledger(folder, "first", 0).add_report(0, 1, 0.5)),
    "part of the table": (f"results.csv.{os.getpid()}.part", lambda at: Results([_ROW]).to_csv(at / "results.csv")),
    "page of a trace": ("rank-0.part", trace_page),
}
REPLACES = {
    "log in torchmpirun": ("rank-0.log", lambda at: checks.check_output_folder("--log-dir", at, replaced="rank-0.log")),
    "new sweep": ("torchmpi-sweep", lambda folder: Ledger(folder, "first", 0).prepare([1], 0, resume=False)),
    "claim": ("0000.log", claim),
    "measured": (_FACTS.path().name, lambda folder: measured_cache.write(_FACTS.path(), _FACTS, {})),
}


@pytest.mark.parametrize("make", [*foreign_files.NOT_OURS, *foreign_files.NOT_FILES], ids=lambda make: make.__name__)
@pytest.mark.parametrize("what", [*WRITES, *REPLACES])
def test_writes(tmp_path, monkeypatch, caplog, what, make):
    name, write = (WRITES | REPLACES)[what]
    path = tmp_path / name
    make(path)
    monkeypatch.setenv("TORCHMPI_TUNING_DIR", str(tmp_path))
    before, text = seen(path), ""
    try:
        write(tmp_path)
    except (Exception, SystemExit) as error:
        text = f"{error} {getattr(error, 'filename', '')}"
    text += caplog.text
    if make in foreign_files.NOT_OURS or what in WRITES:
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
