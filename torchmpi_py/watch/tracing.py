"""How far the clocks of the ranks are apart, measured over MPI by Cristian's algorithm.

A rank asks rank 0 for its time, some dozens of times, and keeps the answer with the shortest round trip. Rank 0 read
its clock somewhere between question and answer, so that ::

    offset = (asked + answered) / 2 - time of rank 0         this rank's clock less that of rank 0

is wrong by half the round trip at most. The ranks of a node share one clock: one of them asks, the others take its
word, and on the node of rank 0 the offset is 0, exactly.

The operations of a trace as Chrome's trace format has them: rows of events that follow each other.

Operations of one *lane* take turns, so that a lane is a row:

direct       blocking calls
background   asynchronous ones in the communication thread; "queued us" is the time from launch to begin
posted       asynchronous ones that MPI carries out by itself, from launch until they were found complete; as they
             overlap, they take as many rows as it needs

Profiling traces: what this rank did and when, in a file that Chrome and Perfetto show.

With TORCHMPI_PROFILE=DIR, which ``torchmpirun --profile DIR`` sets, ``start`` begins a trace and ``stop`` writes it to
DIR/rank-R.json: what torch.profiler saw (operators of the thread that called ``start``, and of backward passes; CUDA
kernels), and our operations in rows of their own (``trace_rows.py``). Both are on one axis, for torch's times are those
of time.time_ns, counted from ``baseTimeNanoseconds``.

A file also says how far this rank's clock was from rank 0's, at the begin and, unless the rank failed, at the end;
``python -m torchmpi_py.bench trace DIR`` puts the ranks on one axis by that. While nothing is traced ``current`` is
None, which is all that an operation looks at.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import itertools
import json
import logging
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchmpi_py.core import config
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.journal import Traced
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree, TorchMPIError

NUM_ROUNDS = 50
_TAG = 7011


class Reading(NamedTuple):
    """What was measured: all three in nanoseconds, ``at_ns`` by this rank's own clock."""

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


def read(comm: MPI.Comm, nodes: Sequence[int], clock: Callable[[], int] = time.time_ns) -> Reading:
    """This rank's clock against rank 0's. Collective over ``comm``, on which nothing else is under way.

    ``nodes`` says for each rank which is the lowest rank on its node.
    """
    mine = Reading(clock(), 0, 0)
    for asker in sorted(set(nodes) - {nodes[0]}):
        if comm.rank == 0:
            _answer(comm, asker, clock)
        elif comm.rank == asker:
            mine = min((_ask(comm, clock) for _ in range(NUM_ROUNDS)), key=lambda reading: reading.uncertainty_ns)
    return Reading(*comm.allgather(tuple(mine))[nodes[comm.rank]])


def _ask(comm: MPI.Comm, clock: Callable[[], int]) -> Reading:
    answer = array.array("q", [0])
    asked = clock()
    comm.Send(answer, 0, _TAG)
    comm.Recv(answer, 0, _TAG)
    answered = clock()
    return Reading(answered, (asked + answered) // 2 - answer[0], (answered - asked + 1) // 2)


def _answer(comm: MPI.Comm, asker: int, clock: Callable[[], int]) -> None:
    for _ in range(NUM_ROUNDS):
        buffer = array.array("q", [0])
        comm.Recv(buffer, asker, _TAG)
        buffer[0] = clock()
        comm.Send(buffer, asker, _TAG)


LANES = ("direct", "background", "posted")
POSTED = 2  # the first two are those of channels
CATEGORY = "torchmpi"  # of our events, and the key of what a file says about its rank
_FIRST_ROW = 2_000_000_000  # no thread has such a number
_ROWS_PER_LANE = 16  # where more overlap, the last row shows them badly
_NUM_ROWS = len(LANES) * _ROWS_PER_LANE


class TraceEvent(NamedTuple):
    """One operation. ``launched`` is 0 for a blocking call; times are of time.time_ns."""

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
    """The operations, and the names of their rows; times are microseconds since ``base_ns``."""
    ends: dict[int, int] = {}  # of the last operation in each row
    placed = []
    for event in sorted(events, key=lambda event: event.begin):
        candidates = range(event.thread_role * _ROWS_PER_LANE, (event.thread_role + 1) * _ROWS_PER_LANE)
        row = next((row for row in candidates if ends.get(row, 0) <= event.begin), candidates[-1])
        ends[row] = event.end
        placed.append(_chrome_event(event, process_id, _FIRST_ROW + row, base_ns))
    for row in ends:
        thread_role = row // _ROWS_PER_LANE
        about = {"ph": "M", "pid": process_id, "tid": _FIRST_ROW + row, "ts": 0}
        name = "torchmpi operations" + (f" ({LANES[thread_role]})" if thread_role else "")
        placed.append(about | {"name": "thread_name", "args": {"name": name}})
        placed.append(about | {"name": "thread_sort_index", "args": {"sort_index": row - _NUM_ROWS}})
    return placed


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


logger = logging.getLogger("torchmpi_py")

current: Trace | None = None
"""The trace that is being recorded; read it as ``tracing.current``."""

_numbers = itertools.count(1)
_job = time.time_ns()  # rank 0's tells the traces of one job from those of the next one


class Trace:
    """What is recorded between ``start`` and ``stop``, and how it is written."""

    def __init__(self, path: pathlib.Path, world: Communicator, job: int) -> None:
        self.path = path
        self.world = world
        self.job = job
        self.events: list[TraceEvent] = []
        self.readings: list[Reading] = []
        self._is_written = False
        self._nvtx = _nvtx()
        self._profiler = _started_profiler()
        self.read_clock()

    def read_clock(self) -> None:
        """Compare the clocks of all ranks. Collective."""
        nodes = [place.node for place in self.world.background.places]
        self.readings.append(read(self.world.background.mpi, nodes))

    def begin(self, operation: Traced) -> int:
        """An operation begins; what is returned belongs to ``end``."""
        if self._nvtx is not None:
            self._nvtx.range_push(f"{operation.name} {operation.flavour.name} {operation.num_bytes} bytes")
        return time.time_ns()

    def end(self, operation: Traced, thread_role: int, begin: int) -> None:
        """It is over, with a result or an error."""
        end = time.time_ns()
        if self._nvtx is not None and thread_role != POSTED:
            self._nvtx.range_pop()
        comm = operation.comm
        event = TraceEvent(
            operation.name,
            operation.flavour.name,
            operation.num_bytes,
            comm.key,
            comm.size,
            thread_role,
            operation.launched,
            begin,
            end,
        )
        self.events.append(event)

    def write(self) -> None:
        """End torch's profiler, and write everything to ``path``, whole or not at all; once."""
        if self._is_written:
            return
        self._is_written = True
        part = self.path.with_suffix(".part")
        try:
            data = self._of_torch(part)
            data["traceEvents"] += chrome_events(self.events, os.getpid(), data["baseTimeNanoseconds"])
            data |= {CATEGORY: self._about(), "traceName": str(self.path)}
            part.write_text(json.dumps(data))
            part.rename(self.path)
        except (OSError, ValueError) as error:
            logger.error("cannot write the trace %s: %s", self.path, error)
            with contextlib.suppress(OSError):
                part.unlink()

    def _of_torch(self, part: pathlib.Path) -> dict[str, Any]:
        """What its profiler saw; without it, nothing, with a warning."""
        empty = {"displayTimeUnit": "ms", "baseTimeNanoseconds": self.readings[0].at_ns, "traceEvents": []}
        if self._profiler is None:  # it has been warned of
            return empty
        try:
            if not _is_main_thread():
                atexit.register(self._profiler.stop)  # a process that ends while it runs crashes
                raise RuntimeError("it ends only in the main thread, where it began")
            if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                raise RuntimeError("the program has started another one, whose end was the end of both")
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(part))
            data: dict[str, Any] = {"baseTimeNanoseconds": 0} | json.loads(part.read_text(errors="replace"))
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning("the trace %s is without what torch.profiler saw: %s", self.path, error)
            return empty
        with_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if with_cuda and not any(event.get("cat") == "kernel" for event in data["traceEvents"]):
            logger.warning("%s: torch.profiler saw no CUDA kernels; KINETO_LOG_LEVEL=0 may tell why", self.path)
        return data

    def _about(self) -> dict[str, Any]:
        return {
            "rank": self.world.rank,
            "size": self.world.size,
            "host": socket.gethostname(),
            "job": self.job,
            "clock": [reading._asdict() for reading in self.readings],
        }


def start(world: Communicator) -> Trace | None:
    """A trace, begun if TORCHMPI_PROFILE names a directory. Collective over ``world``, which is all ranks."""
    directory = config.profile_directory()
    problem = "" if directory is None else _problem(directory)
    told = world.background.mpi.allgather((directory is not None, problem, _job))
    wanted = [rank for rank, (is_wanted, _, _) in enumerate(told) if is_wanted]
    if not wanted:
        return None
    if len(wanted) < len(told):
        without = next(rank for rank in range(len(told)) if rank not in wanted)
        raise RanksDisagree(
            f"start: {config.PREFIX}PROFILE is set on rank {wanted[0]} and not on rank {without}; set it on all hosts, "
            "or use torchmpirun --profile"
        )
    failed = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(told) if text]
    if failed:
        raise TorchMPIError(f"start: no folder for traces on {failed[0]}; give --profile another one")
    assert directory is not None, "every rank wants a trace"
    count = next(_numbers)
    number = "" if count == 1 else f"-{count}"
    return Trace(directory / f"rank-{world.rank}{number}.json", world, told[0][2])


def stop() -> None:
    """Write the trace, if there is one. Collective: the clocks are compared once more."""
    if current is not None:
        current.read_clock()
        current.write()


def save() -> None:
    """Write the trace of this rank alone, which has failed and will end the job; launch/wrap.py calls it, too."""
    if current is not None:
        current.write()


def _problem(directory: pathlib.Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return "" if os.access(directory, os.W_OK) else f"{directory} may not be written to"


def _started_profiler() -> Any:
    """A running one of torch; None, with a warning, where that is impossible. Two at a time end in a crash."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RuntimeError("the program has started one itself")
        if not _is_main_thread():
            raise RuntimeError("mpi.start() was called in another thread than the main one")
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
    except RuntimeError as error:
        logger.warning("torch.profiler does not run, so traces hold our operations only: %s", error)
        return None
    return profiler


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _nvtx() -> Any:
    """NVTX through torch, where it works: ranges for Nsight."""
    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.nvtx.mark("torchmpi")  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return torch.cuda.nvtx
