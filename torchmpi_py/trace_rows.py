"""The operations of a trace as Chrome's trace format has them: rows of events that follow each other.

Operations of one *lane* take turns, so that a lane is a row:

direct       blocking calls
background   asynchronous ones in the communication thread; "queued us" is the time from launch to begin
posted       asynchronous ones that MPI carries out by itself, from launch until they were found complete; as they
             overlap, they take as many rows as it needs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

LANES = ("direct", "background", "posted")
POSTED = 2  # the first two are those of channels
CATEGORY = "torchmpi"  # of our events, and the key of what a file says about its rank
_FIRST_ROW = 2_000_000_000  # no thread has such a number
_ROWS_PER_LANE = 16  # where more overlap, the last row shows them badly
_NUM_ROWS = len(LANES) * _ROWS_PER_LANE


class Event(NamedTuple):
    """One operation. ``launched`` is 0 for a blocking call; times are of time.time_ns."""

    name: str
    flavour: str
    num_bytes: int
    comm: str
    num_ranks: int
    lane: int
    launched: int
    begin: int
    end: int


def chrome_events(events: Sequence[Event], process_id: int, base_ns: int) -> list[dict[str, Any]]:
    """The operations, and the names of their rows; times are microseconds since ``base_ns``."""
    ends: dict[int, int] = {}  # of the last operation in each row
    placed = []
    for event in sorted(events, key=lambda event: event.begin):
        candidates = range(event.lane * _ROWS_PER_LANE, (event.lane + 1) * _ROWS_PER_LANE)
        row = next((row for row in candidates if ends.get(row, 0) <= event.begin), candidates[-1])
        ends[row] = event.end
        placed.append(_chrome_event(event, process_id, _FIRST_ROW + row, base_ns))
    for row in ends:
        lane = row // _ROWS_PER_LANE
        about = {"ph": "M", "pid": process_id, "tid": _FIRST_ROW + row, "ts": 0}
        name = "torchmpi operations" + (f" ({LANES[lane]})" if lane else "")
        placed.append(about | {"name": "thread_name", "args": {"name": name}})
        placed.append(about | {"name": "thread_sort_index", "args": {"sort_index": row - _NUM_ROWS}})
    return placed


def _chrome_event(event: Event, process_id: int, row: int, base_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {
        "flavour": event.flavour,
        "bytes": event.num_bytes,
        "lane": LANES[event.lane],
        "comm": event.comm,
        "ranks": event.num_ranks,
    }
    if event.launched and event.lane != POSTED:
        args["queued us"] = (event.begin - event.launched) / 1000
    place = {"ph": "X", "cat": CATEGORY, "name": event.name, "pid": process_id, "tid": row}
    return place | {"ts": (event.begin - base_ns) / 1000, "dur": (event.end - event.begin) / 1000, "args": args}
