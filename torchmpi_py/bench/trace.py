"""The command ``trace``: the traces of a job's ranks (``torchmpirun --profile DIR``) as one, a process per rank.

A rank's times are converted to rank 0's clock with the offsets that the rank measured at the begin and at the end of
its trace; between these, and beyond, the offset is interpolated linearly. Times then count from the first event of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmpi_py import trusted_files
from torchmpi_py.bench import UsageError
from torchmpi_py.watch.tracing import CATEGORY

_VIEWERS = "open it in https://ui.perfetto.dev or chrome://tracing"
_MOST_BYTES = 1 << 32
_ROWS_PER_RANK = 10_000
_JOINED = "bnesft"  # phases of events that belong together by their id, which is unique in one file only

Place = tuple[Any, Any]  # pid and tid of a row in the file of a rank


@dataclasses.dataclass(frozen=True)
class RankTrace:
    """The trace of one rank, from one file."""

    path: Path
    rank: int
    size: int
    host: str
    job: int
    clock: Sequence[dict[str, int]]  # readings: at_ns, offset_ns, uncertainty_ns
    base_ns: int
    events: Sequence[dict[str, Any]]

    @property
    def num_operations(self) -> int:
        return sum(event.get("cat") == CATEGORY and event["ph"] == "X" for event in self.events)

    def on_rank_0(self, microseconds: float, origin_ns: int) -> float:
        """A time of this trace on rank 0's clock, in microseconds since ``origin_ns``."""
        # offset(t) = offset(first) + slope (t - first): the offset of this clock grows by ``slope`` ns per ns.
        first, last = self.clock[0], self.clock[-1]
        begin = (self.base_ns - first["at_ns"]) / 1000 + microseconds  # since the first reading
        between = last["at_ns"] - first["at_ns"]
        slope = (last["offset_ns"] - first["offset_ns"]) / between if between else 0.0
        return begin * (1 - slope) + (first["at_ns"] - first["offset_ns"] - origin_ns) / 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``trace``."""
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: DIR/trace.json")


def main(options: argparse.Namespace) -> None:
    """Merge the traces in ``options.directory``. UsageError where there are none, or for a file that is no trace."""
    traces, left_out = newest_job(load(options.directory))
    for path in left_out:
        print(f"{path} is left out: it belongs to an earlier job than {traces[0].path.name}", file=sys.stderr)
    missing = sorted(set(range(traces[0].size)) - {trace.rank for trace in traces})
    if missing:
        print(
            f"{options.directory} has no trace of rank {', '.join(map(str, missing))} of {traces[0].size}: a rank that "
            "another one's failure ends leaves none, and a rank on another host leaves it there",
            file=sys.stderr,
        )
    out = options.output or options.directory / "trace.json"
    try:
        trusted_files.write(out, json.dumps(merge(traces)))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error
    for trace in traces:
        print(_line(trace))
    print(f"{out}: {_VIEWERS}", flush=True)


def load(directory: Path) -> list[RankTrace]:
    """The traces in a directory, by rank and then by time."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; give the one that was given to torchmpirun --profile")
    paths = list(directory.glob("rank-*.json"))
    if not paths:
        raise UsageError(
            f"{directory} holds no rank-*.json: torchmpirun --profile {directory} writes them when the program calls "
            "mpi.start(), and mpi.stop() or ends"
        )
    return sorted((_load(path) for path in paths), key=lambda trace: (trace.rank, trace.clock[0]["at_ns"]))


def _load(path: Path) -> RankTrace:
    try:
        data = trusted_files.read_json(path, _MOST_BYTES, owners=None)
        about = {name: data[CATEGORY][name] for name in ("rank", "size", "host", "job", "clock")}
        trace = RankTrace(path, base_ns=data["baseTimeNanoseconds"], events=data["traceEvents"], **about)
        trace.on_rank_0(0.0, 0)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{path} is no trace of torchmpirun --profile: {type(error).__name__}: {error}") from error
    return trace


def newest_job(traces: list[RankTrace]) -> tuple[list[RankTrace], list[Path]]:
    """(the traces of the job that began last, the files of earlier jobs in the same folder)."""
    newest = max(trace.job for trace in traces)
    return [trace for trace in traces if trace.job == newest], [trace.path for trace in traces if trace.job != newest]


def merge(traces: list[RankTrace]) -> dict[str, Any]:
    """One Chrome trace of all ranks."""
    # The origin is the first event of all, on rank 0's clock: times in the file stay small enough for microseconds.
    origin_ns = traces[0].base_ns
    times = (trace.on_rank_0(event["ts"], origin_ns) for trace in traces for event in _shown(trace))
    origin_ns += math.floor(min(times, default=0.0) * 1000)
    events: list[dict[str, Any]] = []
    ids: dict[tuple[Path, Any], int] = {}
    # A rank has several files if its program started more than once; they share the rank's process and rows.
    for rank, group in itertools.groupby(traces, key=lambda trace: trace.rank):
        files = list(group)
        rows = _rows(files)
        events += _names(rank, files[0].host, rows)
        for trace in files:
            events += _moved(trace, rows, origin_ns, ids)
    ranks = [{"rank": trace.rank, "host": trace.host, "clock": trace.clock} for trace in traces]
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": origin_ns,
        CATEGORY: {"size": traces[0].size, "job": traces[0].job, "ranks": ranks},
        "traceEvents": events,
    }


def _shown(trace: RankTrace) -> Iterator[dict[str, Any]]:
    """Events but for names, which ``_names`` writes, and torch's notes about itself, whose process is no number."""
    return (event for event in trace.events if event["ph"] != "M" and isinstance(event.get("pid"), int))


def _rows(files: Sequence[RankTrace]) -> dict[Place, str]:
    """The rows of one rank in order, with their names: its operations, its threads, its GPUs' streams."""
    labels: dict[tuple[Any, ...], Any] = {}
    used: dict[Place, bool] = {}  # whether the row is one of operations
    # Labels come from the events of phase "M": of a process for all of its rows, of a thread for one.
    for event in itertools.chain.from_iterable(trace.events for trace in files):
        if event["ph"] == "M":
            place = (event["pid"],) if event["name"].startswith("process") else (event["pid"], event["tid"])
            key = (event["name"], *place)
            labels[key] = next(iter(event["args"].values()), "")
    for event in itertools.chain.from_iterable(map(_shown, files)):
        used[event["pid"], event["tid"]] = event.get("cat") == CATEGORY

    def order(place: Place) -> tuple[Any, ...]:
        sort = labels.get(("process_sort_index", place[0]), 0), labels.get(("thread_sort_index", *place), 0)
        return not used[place], *sort, str(place)

    def name(place: Place) -> str:
        label = labels.get(("process_labels", place[0]), "CPU")
        thread = labels.get(("thread_name", *place), f"thread {place[1]}").strip()
        return thread if label == "CPU" else f"{label} {thread}"

    return {place: name(place) for place in sorted(used, key=order)}


def _names(rank: int, host: str, rows: Mapping[Place, str]) -> Iterator[dict[str, Any]]:
    """Events that give a rank and its rows their names and their order in the viewer."""
    process = {"ph": "M", "pid": rank, "tid": 0, "ts": 0}
    yield process | {"name": "process_name", "args": {"name": f"rank {rank} ({host})"}}
    yield process | {"name": "process_sort_index", "args": {"sort_index": rank}}
    for number, name in enumerate(rows.values()):
        row = {"ph": "M", "pid": rank, "tid": _row(rank, number), "ts": 0}
        yield row | {"name": "thread_name", "args": {"name": name}}
        yield row | {"name": "thread_sort_index", "args": {"sort_index": number}}


def _moved(
    trace: RankTrace, rows: Mapping[Place, str], origin_ns: int, ids: dict[tuple[Path, Any], int]
) -> Iterator[dict[str, Any]]:
    """The events of a trace in the rows and at the times of the merged trace."""
    numbers = {place: _row(trace.rank, number) for number, place in enumerate(rows)}
    for event in _shown(trace):
        begin = trace.on_rank_0(event["ts"], origin_ns)
        moved = event | {"pid": trace.rank, "tid": numbers[event["pid"], event["tid"]], "ts": round(begin, 3)}
        if "dur" in event:
            moved["dur"] = round(trace.on_rank_0(event["ts"] + event["dur"], origin_ns) - begin, 3)
        # Ids are unique within a file only: each (file, id) gets a number of its own.
        if event["ph"] in _JOINED and "id" in event:
            moved["id"] = ids.setdefault((trace.path, event["id"]), len(ids))
        yield moved


def _row(rank: int, number: int) -> int:
    """A number that no other row has, and no process: viewers mix up rows and processes of equal numbers."""
    return (rank + 1) * _ROWS_PER_RANK + number


def _line(trace: RankTrace) -> str:
    reading = trace.clock[-1]
    return (
        f"rank {trace.rank} ({trace.host}): {trace.num_operations} operations, {len(trace.events)} events; "
        f"clock {reading['offset_ns'] / 1000:+.1f} us from rank 0's, within {reading['uncertainty_ns'] / 1000:.1f}"
    )
