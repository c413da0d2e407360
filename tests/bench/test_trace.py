"""The arithmetic of merging traces, on made-up ones; test_timeline has those of jobs."""

import json
import os

import pytest

from torchmpi_py.bench import __main__ as bench, trace


def x(name, pid, tid, ts, dur, **more):
    return {"ph": "X", "name": name, "cat": "cpu_op", "pid": pid, "tid": tid, "ts": ts, "dur": dur} | more


def named(what, pid, tid, value):
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"x": value}}


def write(folder, rank, events, *, clock, base=10**18, size=2, name="", about=None):
    """A trace as a rank leaves it; ``clock`` is pairs of (seconds since base, offset in nanoseconds)."""
    readings = [{"at_ns": base + int(at * 1e9), "offset_ns": offset, "uncertainty_ns": 1} for at, offset in clock]
    about_rank = {"rank": rank, "size": size, "host": f"host{rank}", "job": 5, "clock": readings} | (about or {})
    data = {"baseTimeNanoseconds": base, "traceEvents": events, "torchmpi": about_rank}
    (folder / (name or f"rank-{rank}.json")).write_text(json.dumps(data))


def merged(folder):
    return trace.merge(trace.newest_job(trace.load(folder))[0])


def events_of(data, name):
    return [event for event in data["traceEvents"] if event["name"] == name]


def test_clocks_are_set_by_that_of_rank_0(tmp_path):
    """Rank 1's clock begins another second, is 1 ms ahead, and gains 100 us a second."""
    ticks = [x("tick", 1, 1, 2e6, 5e6), x("tock", 1, 1, 12e6, 20e6)]
    write(tmp_path, 0, ticks, clock=[(2, 0), (12, 0)])
    ticks = [x("tick", 1, 1, 1e6, 5e6), x("tock", 1, 1, 11e6, 20e6)]
    write(tmp_path, 1, ticks, clock=[(1, 1_000_000), (11, 2_000_000)], base=10**18 + 10**9)
    data = merged(tmp_path)
    (zero, tick), (_, tock) = events_of(data, "tick"), events_of(data, "tock")
    assert data["baseTimeNanoseconds"] == 10**18 + 2 * 10**9 - 1_000_000
    assert (zero["ts"], zero["dur"], tick["ts"]) == (1000, 5e6, 0)
    assert tick["dur"] == pytest.approx(5e6 - 500)
    assert tock["ts"] == pytest.approx(10e6 - 1000)
    assert tock["dur"] == pytest.approx(20e6 - 2000)  # beyond the second reading


def test_rows_and_names(tmp_path):
    events = [
        named("process_labels", 0, 0, "GPU 0"),
        named("process_sort_index", 0, 0, 10**7),
        named("process_sort_index", 50, 0, 50),
        named("thread_name", 0, 7, "stream 7 "),
        named("thread_name", 50, 51, "thread 51 (python)"),
        named("thread_sort_index", 50, 51, 51),
        named("thread_name", 50, 99, "torchmpi operations"),
        named("thread_sort_index", 50, 99, -1),
        x("kernel", 0, 7, 1, 1),
        x("op", 50, 51, 1, 1),
        x("allreduce", 50, 99, 1, 1, cat="torchmpi"),
        x("PyTorch Profiler (0)", "Spans", "PyTorch Profiler", 0, 1),
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9},
    ]
    for rank in (1, 0):
        write(tmp_path, rank, events, clock=[(0, 0)])
    data = merged(tmp_path)
    processes = {event["pid"]: event["args"] for event in events_of(data, "process_name")}
    assert processes == {0: {"name": "rank 0 (host0)"}, 1: {"name": "rank 1 (host1)"}}
    assert [(event["pid"], event["args"]) for event in events_of(data, "process_sort_index")] == [
        (rank, {"sort_index": rank}) for rank in range(2)
    ]
    rows = {event["tid"]: (event["pid"], event["args"]["name"]) for event in events_of(data, "thread_name")}
    order = {event["tid"]: event["args"]["sort_index"] for event in events_of(data, "thread_sort_index")}
    names = ["torchmpi operations", "thread 51 (python)", "GPU 0 stream 7"]
    assert [rows[tid] for tid in sorted(rows, key=lambda tid: (rows[tid][0], order[tid]))] == [
        (rank, name) for rank in range(2) for name in names
    ]
    assert [rows[event["tid"]][1] for event in events_of(data, "kernel")] == ["GPU 0 stream 7"] * 2
    assert not events_of(data, "PyTorch Profiler (0)")
    assert not events_of(data, "Record Window End")


def test_arrows_stay_within_a_rank(tmp_path):
    arrow = [{"ph": phase, "id": 4, "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 1, "ts": 1} for phase in "sf"]
    for rank in range(2):
        write(tmp_path, rank, arrow, clock=[(0, 0)])
    first, second, third, fourth = (event["id"] for event in events_of(merged(tmp_path), "ac2g"))
    assert first == second != third == fourth


def test_a_program_that_started_twice(tmp_path):
    write(tmp_path, 0, [x("a", 9, 9, 0, 1)], clock=[(0, 0)], size=1)
    write(tmp_path, 0, [x("a", 9, 9, 5e6, 1)], clock=[(5, 0)], size=1, name="rank-0-2.json")
    data = merged(tmp_path)
    assert len(events_of(data, "process_name")) == len(events_of(data, "thread_name")) == 1
    assert [event["ts"] for event in events_of(data, "a")] == [0, 5e6]


def test_ranks_missing_and_left_over(tmp_path, capsys):
    write(tmp_path, 1, [x("a", 9, 9, 0, 1)], clock=[(0, 0)], size=4)
    write(tmp_path, 2, [x("old", 9, 9, 0, 1)], clock=[(0, 0)], size=4, about={"job": 4})
    assert bench.main(["trace", str(tmp_path)]) == 0
    errors = capsys.readouterr().err
    assert f"{tmp_path / 'rank-2.json'} is left out: it belongs to an earlier job than rank-1.json" in errors
    assert f"{tmp_path} has no trace of rank 0, 2, 3 of 4" in errors
    assert not events_of(json.loads((tmp_path / "trace.json").read_text()), "old")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"traceEvents": [], "baseTimeNanoseconds": 0}'],
    ids=["empty", "broken", "list", "nothing", "torch's alone"],
)
def test_a_file_that_is_no_trace(tmp_path, capsys, text):
    (tmp_path / "rank-0.json").write_text(text)
    assert bench.main(["trace", str(tmp_path)]) == 2
    assert f"{tmp_path / 'rank-0.json'} is no trace of torchmpirun --profile" in capsys.readouterr().err


def test_other_mistakes(tmp_path, capsys):
    assert bench.main(["trace", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert bench.main(["trace", str(tmp_path)]) == 2
    assert "holds no rank-*.json" in capsys.readouterr().err
    write(tmp_path, 0, [], clock=[(0, 0)], size=1)
    assert bench.main(["trace", str(tmp_path), "-o", str(tmp_path / "none" / "t.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["rank-0.json"]
