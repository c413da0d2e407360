"""Traces: their events, their files, their clocks, and the agreement of the ranks to trace."""

import concurrent.futures
import json
import pathlib
import time

import pytest
import torch
from support import jobs

from torchmpi_py.core import config
from torchmpi_py.errors import TorchMPIError
from torchmpi_py.watch import tracing
from torchmpi_py.watch.tracing import POSTED, TraceEvent, chrome_events


def operation(begin, end, thread_role=0, launched=0):
    return TraceEvent("allreduce", "mpi", 8, "world", 2, thread_role, launched, begin, end)


def test_rows():
    """Operations that overlap have rows of their own, up to a number."""
    events = [
        *(operation(5000, 9000), operation(1000, 4000), operation(7000, 8000, thread_role=1, launched=2000)),
        *(operation(1000 + i, 6000 + i, POSTED, 1000 + i) for i in range(2)),
        operation(6001, 6002, POSTED, 6001),
    ]
    made = chrome_events(events, 77, 1000)
    names = {event["tid"]: event["args"]["name"] for event in made if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in made if event["name"] == "thread_sort_index"}
    rows = [[event for event in made if event["ph"] == "X" and event["tid"] == tid] for tid in sorted(names)]
    kinds = [names[tid].removeprefix("torchmpi operations") for tid in sorted(names, key=order.get)]
    assert kinds == ["", " (background)", " (posted)", " (posted)"]
    times = [[(event["ts"], event["dur"]) for event in row] for row in rows]
    assert times == [[(0, 3), (4, 4)], [(6, 1)], [(0, 5), (5.001, 0.001)], [(0.001, 5)]]
    assert rows[0][0]["args"] == {"flavour": "mpi", "bytes": 8, "lane": "direct", "comm": "world", "ranks": 2}
    assert rows[1][0]["args"]["queued us"] == 5
    assert {event["pid"] for event in made} == {77}
    made = chrome_events([operation(0, 100, POSTED, 1) for _ in range(40)], 1, 0)
    assert len({event["tid"] for event in made}) == 16


def test_the_directory_is_absolute():
    assert config.profile_directory({"TORCHMPI_PROFILE": ""}) is config.profile_directory({}) is None
    assert config.profile_directory({"TORCHMPI_PROFILE": "a/b"}) == pathlib.Path.cwd() / "a" / "b"


def test_outside_the_main_thread_no_profiler_is_started(caplog):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(tracing.start_profiler).result() is None
    assert "mpi.start() was called outside the main thread" in caplog.text


PROGRAM = """
import sys, threading, torch
import torchmpi_py as mpi

own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
for turn, kind in enumerate(["alone", "alone again", "with one inside", "ends in a thread", "inside another one"], 1):
    if kind == "inside another one":
        own.start()
    print(kind, file=sys.stderr, flush=True)
    mpi.start()
    if kind == "with one inside":
        with own:
            pass
    mpi.allreduce(torch.ones(turn))
    if kind == "ends in a thread":
        thread = threading.Thread(target=mpi.stop)
        thread.start()
        thread.join()
    else:
        mpi.stop()
    if kind == "inside another one":
        own.stop()
"""


def test_each_start_has_a_file_also_beside_a_profiler_of_the_program(tmp_path):
    """It always has our operations, and those of torch unless the program profiles itself."""
    folder = tmp_path / "new" / "folder"
    job = jobs.python(PROGRAM, env={"TORCHMPI_PROFILE": str(folder), "KINETO_LOG_LEVEL": "99"})
    assert job.returncode == 0, job.stderr
    names = ["rank-0.json", *(f"rank-0-{number}.json" for number in range(2, 6))]
    assert {path.name for path in folder.iterdir()} == set(names)
    for turn, name in enumerate(names, 1):
        data = json.loads((folder / name).read_text())
        ours = [event for event in data["traceEvents"] if event.get("cat") == "torchmpi"]
        assert [(event["name"], event["args"]["bytes"]) for event in ours] == [("allreduce", 4 * turn)]
        assert any(event.get("cat") == "cpu_op" for event in data["traceEvents"]) == (turn <= 2)
        assert (data["torchmpi"]["rank"], data["torchmpi"]["size"]) == (0, 1)
        assert [reading["offset_ns"] for reading in data["torchmpi"]["clock"]] == [0, 0]
    silent, inside = job.stderr.split("with one inside")
    assert silent.split() == ["alone", "alone", "again"]
    for warning in ("the program ran a profiler too", "only the main thread", "the program already runs a profiler"):
        assert inside.count(warning) == 1, job.stderr


@pytest.fixture
def trace(mpi, tmp_path, monkeypatch):
    """Trace what the test does; the file is written when it calls ``stop``."""
    monkeypatch.setenv("TORCHMPI_PROFILE", str(tmp_path))
    tracing.current = tracing.start(mpi.communicator())
    yield tracing.current.path
    tracing.current = None


@pytest.mark.mpi
@pytest.mark.parametrize("per_node", [1, 2, 100])
def test_clocks_that_are_apart(mpi, per_node):
    skew = 10**12  # far more from node to node than the test can take
    nodes = [rank - rank % per_node for rank in range(mpi.size())]
    mine = nodes[mpi.rank()] * skew
    reading = tracing.read_clock(mpi.communicator().background.mpi, nodes, lambda: time.time_ns() + mine)
    assert abs(reading.offset_ns - mine) <= reading.uncertainty_ns
    assert abs(reading.at_ns - time.time_ns() - mine) < skew // 2
    if nodes[mpi.rank()] == 0:
        assert (reading.offset_ns, reading.uncertainty_ns) == (0, 0)
    else:
        assert 0 < reading.uncertainty_ns < skew // 2


@pytest.mark.mpi
def test_lanes(mpi, trace):
    before = time.time_ns()
    mpi.allreduce(torch.ones(3), flavour="ring")
    mpi.wait_all([mpi.allreduce_async(torch.ones(100), flavour=name) for name in ("ring", "mpi")])
    after = time.time_ns()
    tracing.stop()
    data = json.loads(trace.read_text())
    made = [event["args"] for event in data["traceEvents"] if event.get("cat") == "torchmpi"]
    first, *others = [(each["lane"], each["flavour"], each["bytes"]) for each in made]
    assert first == ("direct", "ring", 12)
    assert sorted(others) == [("background", "ring", 400), ("posted", "mpi", 400)]
    begin, end = ((time - data["baseTimeNanoseconds"]) / 1000 for time in (before, after))
    for event in data["traceEvents"]:
        if event.get("cat") in ("torchmpi", "cpu_op"):
            assert begin - 1000 < event["ts"] < event["ts"] + event["dur"] < end + 1000


@pytest.mark.mpi
def test_traces_that_cannot_be_written(mpi, tmp_path, monkeypatch):
    """All ranks say so: where the folder cannot be made on one of them, and where one of them alone is to trace."""
    last = mpi.size() - 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHMPI_PROFILE", str(tmp_path / ("file/folder" if mpi.rank() == last else "folder")))
    with pytest.raises(TorchMPIError, match=f"cannot write traces on rank {last}.*pass another folder to --profile"):
        tracing.start(mpi.communicator())
    if last > 0:
        if mpi.rank() < last:
            monkeypatch.delenv("TORCHMPI_PROFILE")
        with pytest.raises(mpi.RanksDisagree, match=f"TORCHMPI_PROFILE is set on rank {last} and not on rank 0"):
            tracing.start(mpi.communicator())
    assert tracing.current is None
