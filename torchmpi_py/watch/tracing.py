"""Write profiling traces: a file for Chrome or Perfetto with the operations of this rank and their times.

With TORCHMPI_PROFILE=DIR, which ``torchmpirun --profile DIR`` sets, ``start`` begins a trace and ``stop`` writes it to
DIR/rank-R.json. A trace has the events of torch.profiler: operators of the thread that called ``start`` and of backward
passes, and CUDA kernels. Separate rows show our operations.

torch.profiler alone cannot show our operations. It records neither the communication thread nor operations that MPI
carries out without a thread, and it does not run if the program has started a profiler. Both kinds of events share one
time axis, because torch's times are time.time_ns minus ``baseTimeNanoseconds``.

Each operation belongs to a *lane*. If the operations of a lane do not overlap, the lane is one row of the trace:

direct       blocking calls
background   asynchronous operations in the communication thread; "queued us" is the time from launch to start
posted       asynchronous operations that MPI carries out itself, from the launch until a test shows completion.
             They overlap, so this lane has up to 16 rows

A file also states the offset of this rank's clock from rank 0's clock, at the start and, unless the rank failed, at the
end. To measure the offset, a rank requests rank 0's time over MPI 50 times, and keeps the answer with the shortest
round trip (Cristian, "Probabilistic clock synchronization", 1989). Rank 0 reads its clock between question and answer,
so the error of ::

    offset = (asked + answered) / 2 - time of rank 0         this rank's clock minus rank 0's clock

is at most half the round trip. The ranks of a node share one clock, so one rank of each node measures the offset for
all ranks of the node. On the node of rank 0 the offset is exactly 0.
"""

from __future__ import annotations

import array
import atexit
import itertools
import json
import logging
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchmpi_py import trusted_files
from torchmpi_py.core import agree, config
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.journal import Recorded
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree, TorchMPIError

logger = logging.getLogger("torchmpi_py")

CATEGORY = "torchmpi"  # the category of our events, and the key of the facts about the rank
LANES = ("direct", "background", "posted")
POSTED = 2  # index of LANES; the first two lanes are thread roles of channels
_FIRST_ROW = 2_000_000_000  # larger than any thread ID
_ROWS_PER_LANE = 16  # If more operations overlap, they overlap in the last row.
_NUM_ROWS = len(LANES) * _ROWS_PER_LANE
_NUM_ROUNDS = 50
_TAG = 7011


class Reading(NamedTuple):
    """This rank's clock relative to rank 0's, in nanoseconds; ``at_ns`` is this rank's time at the reading."""

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


def read_clock(comm: MPI.Comm, nodes: Sequence[int], clock: Callable[[], int] = time.time_ns) -> Reading:
    """Compare this rank's clock with rank 0's clock. All ranks of ``comm`` must call this function.

    No other operation may use ``comm`` at the same time. ``nodes`` lists the lowest rank on the node of each rank.
    ``clock`` returns a time in ns.
    """
    mine = Reading(clock(), 0, 0)
    for asker in sorted(set(nodes) - {nodes[0]}):
        if comm.rank == 0:
            _answer(comm, asker, clock)
        elif comm.rank == asker:
            mine = min((_ask(comm, clock) for _ in range(_NUM_ROUNDS)), key=lambda reading: reading.uncertainty_ns)
    return Reading(*comm.allgather(tuple(mine))[nodes[comm.rank]])


def _ask(comm: MPI.Comm, clock: Callable[[], int]) -> Reading:
    answer = array.array("q", [0])
    asked = clock()
    comm.Send(answer, 0, _TAG)
    comm.Recv(answer, 0, _TAG)
    answered = clock()
    return Reading(answered, (asked + answered) // 2 - answer[0], (answered - asked + 1) // 2)


def _answer(comm: MPI.Comm, asker: int, clock: Callable[[], int]) -> None:
    for _ in range(_NUM_ROUNDS):
        buffer = array.array("q", [0])
        comm.Recv(buffer, asker, _TAG)
        buffer[0] = clock()
        comm.Send(buffer, asker, _TAG)


class TraceEvent(NamedTuple):
    """One operation. Times are from time.time_ns; ``launched`` is 0 for a blocking call."""

    name: str
    flavour: str
    num_bytes: int
    comm: str
    num_ranks: int
    thread_role: int
    launched: int
    begin: int
    end: int


def chrome_events(events: Sequence[TraceEvent], process_id: int, base_ns: int) -> list[dict[str, Any]]:
    """Return the operations and their row names in Chrome's format, with times in microseconds since ``base_ns``."""
    ends: dict[int, int] = {}  # row -> end of its last operation
    chrome = []
    # 1. Put each operation into the first row of its lane that is free when the operation starts.
    for event in sorted(events, key=lambda event: event.begin):
        candidates = range(event.thread_role * _ROWS_PER_LANE, (event.thread_role + 1) * _ROWS_PER_LANE)
        row = next((row for row in candidates if ends.get(row, 0) <= event.begin), candidates[-1])
        ends[row] = event.end
        chrome.append(_chrome_event(event, process_id, _FIRST_ROW + row, base_ns))
    # 2. Name the rows, and sort them before torch's rows.
    for row in ends:
        thread_role = row // _ROWS_PER_LANE
        about = {"ph": "M", "pid": process_id, "tid": _FIRST_ROW + row, "ts": 0}
        name = "torchmpi operations" + (f" ({LANES[thread_role]})" if thread_role else "")
        chrome.append(about | {"name": "thread_name", "args": {"name": name}})
        chrome.append(about | {"name": "thread_sort_index", "args": {"sort_index": row - _NUM_ROWS}})
    return chrome


def _chrome_event(event: TraceEvent, process_id: int, row: int, base_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {
        "flavour": event.flavour,
        "bytes": event.num_bytes,
        "lane": LANES[event.thread_role],
        "comm": event.comm,
        "ranks": event.num_ranks,
    }
    if event.launched and event.thread_role != POSTED:
        args["queued us"] = (event.begin - event.launched) / 1000
    place = {"ph": "X", "cat": CATEGORY, "name": event.name, "pid": process_id, "tid": row}
    return place | {"ts": (event.begin - base_ns) / 1000, "dur": (event.end - event.begin) / 1000, "args": args}


class Trace:
    """The events of this rank between ``start`` and ``stop``, and the file to which they are written."""

    def __init__(self, path: pathlib.Path, world: Communicator) -> None:
        self.path = path
        self.world = world
        self.events: list[TraceEvent] = []
        self.readings: list[Reading] = []
        self._is_written = False
        self._nvtx = _nvtx()
        self._profiler = start_profiler()
        self.read_clock()

    def read_clock(self) -> None:
        """Compare the clocks of all ranks. All ranks must call this method."""
        channel = self.world.background
        self.readings.append(read_clock(channel.mpi, channel.places.nodes.tolist()))

    def begin(self, operation: Recorded) -> int:
        """Mark the start of an operation, and return the start time, which ``end`` needs."""
        if self._nvtx is not None:
            self._nvtx.range_push(f"{operation.name} {operation.flavour.name} {operation.num_bytes} bytes")
        return time.time_ns()

    def end(self, operation: Recorded, thread_role: int, begin: int, launched: int) -> None:
        """Record an operation that started at ``begin`` and has now ended, with a result or an error.

        ``launched`` is the time of its launch, or 0 for a blocking call.
        """
        end = time.time_ns()
        if self._nvtx is not None and thread_role != POSTED:
            self._nvtx.range_pop()
        what, comm = (operation.name, operation.flavour.name, operation.num_bytes), operation.comm
        event = TraceEvent(*what, comm.key, comm.size, thread_role, launched, begin, end)
        self.events.append(event)

    def write(self) -> None:
        """Stop torch's profiler, and write the trace to ``path`` completely or not at all. Later calls do nothing."""
        if self._is_written:
            return
        self._is_written = True
        part, is_ours = self.path.with_suffix(".part"), False
        try:
            trusted_files.refuse_others(self.path)
            trusted_files.write(part, "")
            is_ours = True
            data = self._of_torch(part)
            data["traceEvents"] += chrome_events(self.events, os.getpid(), data["baseTimeNanoseconds"])
            data |= {CATEGORY: self._about(), "traceName": str(self.path)}
            trusted_files.write(part, json.dumps(data))
            part.rename(self.path)
        except (OSError, ValueError) as error:
            logger.error("cannot write the trace %s (%s); pass another folder to --profile", self.path, error)
            if is_ours:
                part.unlink()

    def _of_torch(self, part: pathlib.Path) -> dict[str, Any]:
        """Return torch.profiler's trace, or an empty trace with a warning if torch.profiler cannot provide one."""
        empty = {"displayTimeUnit": "ms", "baseTimeNanoseconds": self.readings[0].at_ns, "traceEvents": []}
        if self._profiler is None:  # start_profiler has already warned.
            return empty
        try:
            if not _is_main_thread():
                atexit.register(self._profiler.stop)  # A process crashes if it exits while the profiler runs.
                raise RuntimeError("only the main thread, which started the profiler, can stop it")
            if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                raise RuntimeError("the program ran a profiler too, which stopped both; use only one of them")
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(part))
            data: dict[str, Any] = {"baseTimeNanoseconds": 0} | json.loads(part.read_text(errors="replace"))
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning("the trace %s lacks the events of torch.profiler: %s", self.path, error)
            return empty
        with_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if with_cuda and not any(event.get("cat") == "kernel" for event in data["traceEvents"]):
            logger.warning("%s: torch.profiler recorded no CUDA kernels; set KINETO_LOG_LEVEL=0 to see why", self.path)
        return data

    def _about(self) -> dict[str, Any]:
        return {
            "rank": self.world.rank,
            "size": self.world.size,
            "host": socket.gethostname(),
            "clock": [reading._asdict() for reading in self.readings],
        }


current: Trace | None = None
"""The trace that is being recorded, or None. Every operation reads this name, and only the session assigns it."""

_numbers = itertools.count(1)


def start(world: Communicator) -> Trace | None:
    """Start a trace if TORCHMPI_PROFILE is set to a folder. All ranks of the job (``world``) must call this function.

    Raise RanksDisagree on all ranks if only some ranks set the variable, or TorchMPIError if a rank cannot write to the
    folder.
    """
    directory = config.profile_directory()
    allgather = world.background.mpi.allgather
    is_wanted = allgather(directory is not None)
    if not any(is_wanted):
        return None
    if (rank := agree.first_different(is_wanted)) is not None:
        wanted, without = (rank, 0) if is_wanted[rank] else (0, rank)
        raise RanksDisagree(
            f"start: {config.PREFIX}PROFILE is set on rank {wanted} and not on rank {without}; set it for all ranks, "
            "or use torchmpirun --profile"
        )
    assert directory is not None, "every rank wants a trace"
    agree.run_on_all_ranks(allgather, lambda: _make_folder(directory), (OSError,), str, _no_folder)
    count = next(_numbers)
    number = "" if count == 1 else f"-{count}"
    return Trace(directory / f"rank-{world.rank}{number}.json", world)


def stop() -> None:
    """Compare the clocks once more and write the trace, if there is a trace. All ranks must call this function."""
    if current is not None:
        current.read_clock()
        current.write()


def save() -> None:
    """Write this rank's trace without comparing the clocks, because this rank has failed and ends the job.

    ``launch/wrap.py`` also calls this function.
    """
    if current is not None:
        current.write()


def _make_folder(directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise PermissionError(f"{directory} is not writable")


def _no_folder(failures: Mapping[int, str]) -> TorchMPIError:
    rank, text = next(iter(failures.items()))
    return TorchMPIError(f"start: cannot write traces on rank {rank}: {text}; pass another folder to --profile")


def start_profiler() -> Any:
    """Start torch.profiler and return it, or return None with a warning if it cannot run.

    Two profilers at the same time would crash the process.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RuntimeError("the program already runs a profiler")
        if not _is_main_thread():
            raise RuntimeError("mpi.start() was called outside the main thread")
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
    except RuntimeError as error:
        logger.warning("torch.profiler does not run, so traces contain only torchmpi_py's operations: %s", error)
        return None
    return profiler


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _nvtx() -> Any:
    """Return torch's NVTX module, for ranges in Nsight, or None if NVTX does not work."""
    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.nvtx.mark("torchmpi")  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return torch.cuda.nvtx
