"""Traces: their events, their files, their clocks, and the agreement of the ranks to trace."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch

from torchmpi_py.core import config
from torchmpi_py.watch import tracing
from torchmpi_py.watch.tracing import POSTED, TraceEvent, chrome_events


def operation(begin, end, thread_role=0, launched=0):
    return TraceEvent("allreduce", "mpi", 8, "world", 2, thread_role, launched, begin, end)


def test_rows():
    events = [
        operation(5000, 9000),
        operation(1000, 4000),
        operation(7000, 8000, thread_role=1, launched=2000),
        *(operation(1000 + i, 6000 + i, POSTED, 1000 + i) for i in range(2)),
        operation(6001, 6002, POSTED, 6001),
    ]
    made = chrome_events(events, 77, 1000)
    names = {event["tid"]: event["args"]["name"] for event in made if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in made if event["name"] == "thread_sort_index"}
    rows = [[event for event in made if event["ph"] == "X" and event["tid"] == tid] for tid in sorted(names)]
    assert [names[tid] for tid in sorted(names, key=order.get)] == [
        "torchmpi operations",
        "torchmpi operations (background)",
        "torchmpi operations (posted)",
        "torchmpi operations (posted)",
    ]
    assert [[(event["ts"], event["dur"]) for event in row] for row in rows] == [
        [(0, 3), (4, 4)],
        [(6, 1)],
        [(0, 5), (5.001, 0.001)],
        [(0.001, 5)],
    ]
    assert rows[0][0]["args"] == {"flavour": "mpi", "bytes": 8, "lane": "direct", "comm": "world", "ranks": 2}
    assert rows[1][0]["args"]["queued us"] == 5
    assert {event["pid"] for event in made} == {77}


def test_more_posted_operations_than_rows():
    made = chrome_events([operation(0, 100, POSTED, 1) for _ in range(40)], 1, 0)
    assert len({event["tid"] for event in made}) == 16


def test_the_directory_is_absolute():
    assert config.profile_directory({}) is None
    assert config.profile_directory({"TORCHMPI_PROFILE": ""}) is None
    assert config.profile_directory({"TORCHMPI_PROFILE": "a/b"}) == pathlib.Path.cwd() / "a" / "b"


def test_without_a_directory_nothing_is_traced(monkeypatch):
    assert tracing.current is None
    tracing.stop()
    tracing.save()


PROGRAM = """
import sys, threading, torch
import torchmpi_py as mpi

def stop(in_a_thread):
    if in_a_thread:
        thread = threading.Thread(target=mpi.stop)
        thread.start()
        thread.join()
    else:
        mpi.stop()

own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
if sys.argv[1] == "around":
    own.start()
for turn in range(2):
    mpi.start()
    if sys.argv[1] == "inside" and turn == 0:
        with own:
            pass
    mpi.allreduce(torch.ones(2 + turn))
    stop(in_a_thread=sys.argv[1] == "inside" and turn == 1)
if sys.argv[1] == "around":
    own.stop()
"""


def run(folder, *arguments):
    """A program that starts twice, in a world of one."""
    environment = os.environ | {"TORCHMPI_PROFILE": str(folder), "KINETO_LOG_LEVEL": "99"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment, capture_output=True, text=True, timeout=200
    )


def operations(path):
    data = json.loads(path.read_text())
    ours = [event for event in data["traceEvents"] if event.get("cat") == "torchmpi"]
    return [(event["name"], event["args"]["bytes"]) for event in ours], data


def test_a_second_start_has_a_file_of_its_own(tmp_path):
    folder = tmp_path / "new" / "folder"
    job = run(folder, "")
    assert (job.returncode, job.stderr) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0-2.json", "rank-0.json"]
    for name, num_bytes in (("rank-0.json", 8), ("rank-0-2.json", 12)):
        found, data = operations(folder / name)
        assert found == [("allreduce", num_bytes)]
        assert any(event.get("cat") == "cpu_op" for event in data["traceEvents"])
        assert (data["torchmpi"]["rank"], data["torchmpi"]["size"]) == (0, 1)
        assert [reading["offset_ns"] for reading in data["torchmpi"]["clock"]] == [0, 0]


@pytest.mark.parametrize(
    ("where", "warnings"),
    [
        ("around", ["does not run, so traces hold our operations only: the program has started one"]),
        ("inside", ["the program has started another one", "it ends only in the main thread"]),
    ],
)
def test_a_program_with_a_profiler_of_its_own_keeps_our_operations(tmp_path, where, warnings):
    job = run(tmp_path, where)
    assert job.returncode == 0
    assert [warning in job.stderr for warning in warnings] == [True] * len(warnings)
    assert operations(tmp_path / "rank-0.json")[0] == [("allreduce", 8)]
    assert operations(tmp_path / "rank-0-2.json")[0] == [("allreduce", 12)]


def test_outside_the_main_thread_no_profiler_is_started(caplog):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(tracing.start_profiler).result() is None
    assert "mpi.start() was called in another thread" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    job = run(tmp_path / "file" / "folder", "")
    assert job.returncode == 1
    assert "no folder for traces on rank 0" in job.stderr
    assert "give --profile another one" in job.stderr


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
    handles = [mpi.allreduce_async(torch.ones(100), flavour=name) for name in ("ring", "mpi")]
    mpi.wait_all(handles)
    after = time.time_ns()
    tracing.stop()
    data = json.loads(trace.read_text())
    made = [event for event in data["traceEvents"] if event.get("cat") == "torchmpi"]
    assert [(event["args"]["lane"], event["args"]["flavour"], event["args"]["bytes"]) for event in made] == [
        ("direct", "ring", 12),
        *sorted(
            [("background", "ring", 400), ("posted", "mpi", 400)],
            key=lambda lane: lane[0] != made[1]["args"]["lane"],
        ),
    ]
    begin, end = ((time - data["baseTimeNanoseconds"]) / 1000 for time in (before, after))
    for event in data["traceEvents"]:
        if event.get("cat") in ("torchmpi", "cpu_op"):
            assert begin - 1000 < event["ts"] < event["ts"] + event["dur"] < end + 1000


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_not_agree_whether_to_trace(mpi, tmp_path, monkeypatch):
    if mpi.rank() == 1:
        monkeypatch.setenv("TORCHMPI_PROFILE", str(tmp_path))
    with pytest.raises(mpi.RanksDisagree, match="TORCHMPI_PROFILE is set on rank 1 and not on rank 0"):
        tracing.start(mpi.communicator())
    assert tracing.current is None
