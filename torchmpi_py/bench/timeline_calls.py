"""A comparison of the operations of all ranks: which rank called last, and how long the other ranks waited.

Each rank counts the operations of a communicator and thread in the same order, so an operation has the same number on
all ranks. An operation cannot complete on all ranks before the last rank has called it. (The root of a small broadcast
may return earlier.) For each operation that all ranks of the communicator have called, the page computes::

    arrival        the latest start on any rank. The rank with this start is the last rank.
    wait           arrival - start on a rank
    transfer       the latest end on any rank - arrival
    bandwidth      bytes / transfer
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchmpi_py.bench import UsageError
from torchmpi_py.watch import flight_recorder, kept_boards
from torchmpi_py.watch.flight_recorder import PREFIX

STATES = ("complete", "under way", "launched", "failed")
COMPLETE, UNDER_WAY, LAUNCHED, FAILED = range(4)
UNKNOWN, MISSING = -1.0, -2.0
"""Special values of ``wait_us``: the wait is unknown (or only some ranks call the operation), or a rank is missing."""


@dataclasses.dataclass
class RecordedCall:
    """An operation of one rank. Times are in ns, on the clock of rank 0's host."""

    text: str  # collective, flavour, dtype, arguments
    site: str
    comm: str
    num_bytes: int
    launched: int
    begin: int
    end: int
    state: int
    key: tuple[str, int] | None  # (communicator, number) of a collective, equal on all ranks; else None
    wait_us: float = UNKNOWN
    transfer_ns: int = 0  # 0 if unknown

    @property
    def duration_us(self) -> float:
        return (self.end - self.begin) / 1000


@dataclasses.dataclass
class RankCalls:
    """The operations of one rank, the oldest first. ``num_before`` counts older operations without a record."""

    rank: int
    host: str
    how_ended: str
    calls: list[RecordedCall]
    num_before: int
    num_last: int = 0  # number of operations that this rank called last
    kept_others_us: float = 0.0  # total time that the other ranks waited in these operations

    @property
    def waited_us(self) -> float:
        return sum(call.wait_us for call in self.calls if call.wait_us > 0)


class JobCalls(NamedTuple):
    """The data of a timeline page. ``members`` maps a communicator's name in the dumps to the communicator's ranks."""

    ranks: list[RankCalls]
    members: Mapping[str, Sequence[int]]
    num_ranks: int
    versions: str
    restart: int = 0  # number of the job's restart that left the records; 0 for the first start
    is_of_last: bool = True  # whether the records are from the last start of the job


def read(directory: Path, about: Mapping[str, Any]) -> JobCalls:
    """Return the operations of the ranks whose status boards or dumps are in ``directory``.

    Raise UsageError if there are no records, or if the records cannot be read.
    """
    try:
        num_ranks, kept = kept_boards.load(directory)
    except Exception as error:  # A damaged board can raise any exception.
        raise UsageError(f"cannot read the records of the ranks in {directory}: {error}") from error
    if kept:
        dumps = {rank.dump["rank"]: rank.dump for rank in kept}
        places = {rank.dump["rank"]: (rank.host, f"with{'' if rank.has_left else 'out'} mpi.stop()") for rank in kept}
    elif about:
        raise UsageError("no rank called mpi.start(), or no rank ran on a host that shares the page's folder")
    else:
        dumps = load(directory)
        places = dict.fromkeys(dumps, ("", ""))
        num_ranks = 1 + max(dumps)
    versions, restart = (kept[0].versions, kept[0].restart) if kept else ("", 0)
    is_of_last = about.get("restart", restart) == restart  # Else open operations ended with an earlier start.
    now = (about.get("ended_ns") if is_of_last else 0) or max(map(_last_time, dumps.values()))
    ranks = [_of_rank(dump, *places[rank], now) for rank, dump in dumps.items()]
    groups = {name: group for dump in dumps.values() for name, group in dump["pg_config"].items()}
    members = {name: json.loads(group["ranks"]) for name, group in groups.items()}
    return JobCalls(ranks, members, num_ranks, versions, restart, is_of_last)


def load(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the newest dump of each rank in a folder and its subfolders. Raise UsageError if there are no dumps."""
    paths = [path for path in directory.rglob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    try:
        dumps = [flight_recorder.read(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]
        found = {int(dump["rank"]): dump for dump in dumps}
    except Exception as error:  # A damaged pickle can raise any exception.
        raise UsageError(f"cannot read a dump in {directory}: {error}") from error
    if not found:
        raise UsageError(
            f"{directory} has no dumps ({PREFIX}0, ...); pass the folder that the report of the hung job shows"
        )
    return dict(sorted(found.items()))


def _last_time(dump: Mapping[str, Any]) -> int:
    names = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
    return max((entry[name] or 0 for entry in dump["entries"] for name in names), default=0)


def _of_rank(dump: Mapping[str, Any], host: str, how_ended: str, now: int) -> RankCalls:
    calls = [_call(entry, now) for entry in dump["entries"]]
    num_before = dump["entries"][0]["op_id"] - 1 if calls else 0
    return RankCalls(dump["rank"], host, how_ended, sorted(calls, key=lambda call: call.begin), num_before)


def _call(entry: Mapping[str, Any], now: int) -> RecordedCall:
    # ``what`` is the text of the call, followed by ", N bytes" if the call has bytes.
    text, _, num_bytes = entry["what"].removesuffix(" bytes").rpartition(", ")
    if not (text and num_bytes.isdigit()):
        text, num_bytes = entry["what"], "0"
    launched, end = entry["time_created_ns"], entry["time_discovered_completed_ns"]
    begin = entry["time_discovered_started_ns"] or launched
    state = FAILED if entry["has_failed"] else COMPLETE if end else {"started": UNDER_WAY}.get(entry["state"], LAUNCHED)
    number, (name, comm) = entry["collective_seq_id"], entry["process_group"]
    key = (name, number) if number else None
    return RecordedCall(text, entry["site"], comm, int(num_bytes), launched, begin, max(begin, end or now), state, key)


def meet(job: JobCalls) -> None:
    """Compute the waits, the transfers and the last ranks of operations with equal keys, and store them in ``job``."""
    found: dict[tuple[str, int], dict[int, RecordedCall]] = {}
    for rank in job.ranks:
        for call in rank.calls:
            if call.key is not None:
                found.setdefault(call.key, {})[rank.rank] = call
    by_number = {rank.rank: rank for rank in job.ranks}
    for (name, number), calls in found.items():
        missing = set(job.members.get(name, ())) - set(calls)
        if missing or not job.members.get(name):
            has_not_come = any(_is_behind(by_number.get(rank), name, number) for rank in missing)
            for call in calls.values():
                call.wait_us = MISSING if has_not_come and call.state in (UNDER_WAY, FAILED) else UNKNOWN
            continue
        last = max(calls, key=lambda rank: calls[rank].begin)
        arrival, is_over = calls[last].begin, all(call.state == COMPLETE for call in calls.values())
        transfer_ns = max(call.end for call in calls.values()) - arrival if is_over else 0
        for call in calls.values():
            # A rank that returned before the last rank called, such as a broadcast's root, did not wait for that rank.
            call.wait_us = (arrival - call.begin) / 1000 if call.end >= arrival else UNKNOWN
            call.transfer_ns = transfer_ns
        if len(calls) > 1:
            by_number[last].num_last += 1
            by_number[last].kept_others_us += sum(call.wait_us for call in calls.values() if call.wait_us > 0)


def _is_behind(rank: RankCalls | None, name: str, number: int) -> bool:
    """Return whether ``rank``, which has no record of an operation, has not called this operation yet.

    If the rank has called the operation, the record was overwritten, or the rank's board is on another host.
    """
    if rank is None:
        return False
    numbers = [call.key[1] for call in rank.calls if call.key is not None and call.key[0] == name]
    return max(numbers, default=0) < number and (bool(numbers) or rank.num_before == 0)
