"""Marks: files that ranks leave in the job's folder for torchmpirun.

Files serve where the MPI does not: they need no connection, and they outlive a rank that was killed. Each mark is
written under a different name and then renamed, so a reader sees a complete mark or none. R is a rank, P a process.

- running-R: rank R has not ended in order yet. Holds its process number, the namespace in which this number is valid
  (another host or container may share the folder), a checksum of its command line, and its start time.
- alive-R: a pipe that rank R holds open until it ends, and writes into when it fails.
- failed-R: rank R failed. Holds the time, the exit code, what rank R reported about another rank, and the shared memory
  that rank R held.
- through-R: rank R's program has returned; functions registered with atexit may still run.
- stage-R: where rank R is from its first ``mpi.stop()`` on, and how long it may wait there (`Stage`).
- over-R: running-R under a new name, once rank R has run everything that its program had registered with atexit.
- alone-R: rank R ended in order without contacting another rank.
- met-R: rank R, or a process that it started, began to contact other ranks.
- heard-R: Ctrl-C reached rank R's program.
- own-R: rank R's program has installed its own handler for Ctrl-C, which leaves no ``heard-R``.
- ended-R: rank R ended because all ranks agreed to end the job on request. Holds its exit code.
- ending: torchmpirun itself passes on a signal that asks the job to end.
- remains: what must be cleared away if torchmpirun is killed (`cleanup`).
- guard-P: process P, which is torchmpirun or its guardian, clears the folder away. Has the form of ``running-R``.

On a full disk some marks are missing, but the job still ends. The end of this file holds the function by which a
failing rank aborts the job.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import os
import resource
import select
import stat
import sys
import termios
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchmpi_py.launch import proc, variables

# Seconds for mpirun to read what a rank has written, such as a traceback, and to pass it on. Their sum, with the second
# by which Open MPI delays aborts under srun, is less than job.FAILURE_GRACE_SECONDS. After that time torchmpirun ends a
# job in which a rank has failed.
_UNREAD_SECONDS = 1.5
_OUTPUT_SECONDS = 0.3
_ENDING_SECONDS = 1.5  # for the kernel to free the memory of a rank that is ending, before a failure is recorded
_UNKNOWN = "unknown"
_STARTER_SECONDS = 10.0  # limit for MPI_Abort itself
_KILLED_SECONDS = 2.0  # limit for mpirun to kill a rank that has called MPI_Abort


def leave(folder: str | Path, mark: str, text: str = "") -> bool:
    """Leave a mark; return whether that worked: other hosts lack the folder, and a disk may be full."""
    if folder and os.path.isdir(folder):
        with contextlib.suppress(OSError):
            part = Path(folder) / f"part-{mark}"
            part.write_text(text)
            part.rename(part.with_name(mark))
            return True
    return False


def is_left(folder: str | Path, mark: str) -> bool:
    """Return whether a mark exists; False on another host, where no marks can be seen."""
    return bool(folder) and os.path.exists(os.path.join(folder, mark))


@contextlib.contextmanager
def running(folder: str, rank: int) -> Iterator[None]:
    """Keep ``running-R`` until this process ends in order, and leave ``through-R`` at the end of the block.

    A process that ends in order leaves ``alone-R`` as well, if it has not contacted another rank.

    A process whose mark stays did not reach the end: it was killed, it aborted, or it called os._exit. The mark is
    needed because MPICH takes os._exit(0) on one rank for success. Functions registered with atexit, such as
    ``mpi.stop``, belong to the run: the block begins before the program can register any, so this module's own function
    runs last.
    """
    if not folder or not os.path.isdir(folder):
        yield
        return
    mark, process_id = Path(folder) / f"running-{rank}", os.getpid()

    def end_in_order() -> None:
        with contextlib.suppress(OSError):
            if os.getpid() == process_id:  # a forked child is not the rank
                if not has_met():
                    leave(folder, f"alone-{rank}")
                mark.rename(mark.with_name(f"over-{rank}"))

    with contextlib.suppress(OSError):
        pipe = mark.with_name(f"alive-{rank}")
        os.mkfifo(pipe)
        pipe_end = _moved_up(os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        os.register_at_fork(after_in_child=lambda: os.close(pipe_end))
    record(folder, f"running-{rank}", process_id)
    atexit.register(end_in_order)  # the function that is registered first runs last
    try:
        yield
    finally:
        if os.getpid() == process_id:
            leave(folder, f"through-{rank}")


def _moved_up(descriptor: int) -> int:
    """Duplicate the descriptor to a high number, because Linux closes the highest ones first at exit.

    mpirun learns of the end by a connection with a lower number, and then ends the other ranks. Their pipes must not be
    the first to break.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError):
        number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, (min(limit, 1024) if limit > 0 else 1024) - 32)
        os.close(descriptor)
        return number
    return descriptor


def record(folder: str, mark: str, process_id: int) -> None:
    """Leave a mark that names a process."""
    leave(folder, mark, f"{process_id} {_numbering()} {_checksum(process_id)} {_beginning(process_id)}")


def ranks_running(folder: Path, mark: str = "running") -> dict[int, int]:
    """Return the process ID of each rank that has this ``mark``; 0 if it has no ID in this PID namespace."""
    return {int(rank): process_id for rank, process_id, _ in _processes(folder, mark)}


def processes_of_ranks(folder: Path) -> set[int]:
    """Return the ranks' processes that live here, by process number and start time.

    The marks are needed because a rank that has set its title hides its environment.
    """
    marks = (*_processes(folder, "running"), *_processes(folder, "over"))
    return {process_id for _, process_id, lives in marks if lives}


def is_abandoned(folder: str) -> bool:
    """Return whether every process that clears a job's folder away has left a mark and has ended."""
    with contextlib.suppress(OSError, ValueError):  # the folder is not a job's
        guards = {bool(process_id) and not lives for _, process_id, lives in _processes(folder, "guard")}
        return guards == {True}
    return False


def _processes(folder: str | Path, kind: str) -> Iterator[tuple[str, int, bool]]:
    """Yield for each mark of a kind the end of its name, the process, and whether the process lives.

    The process is 0 if it has no number here.
    """
    for path in Path(folder).glob(f"{kind}-*"):
        with contextlib.suppress(FileNotFoundError):
            number, where, _, *start_time = path.read_text().split()
            process_id = int(number) if where == _numbering() != _UNKNOWN else 0
            yield path.name.removeprefix(f"{kind}-"), process_id, start_time == [_beginning(process_id)] != [_UNKNOWN]


def open_pipe(folder: Path, rank: int) -> int:
    """Open the reading end of a rank's pipe.

    The pipe breaks when the rank begins to end, and becomes readable when the rank fails.
    """
    return os.open(folder / f"alive-{rank}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def is_held(pipe: int) -> bool:
    """Return whether a rank holds the other end. One byte of a failure stays in the pipe, which is enough."""
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(pipe, 1))
    return True


def release_replaced(folder: Path, rank: int) -> bool:
    """Remove the mark of a rank that has become another program (exec); return whether it has.

    Call this for a rank whose pipe is broken, because exec closes the pipe. The end of the new program concerns only
    the MPI.
    """
    mark = folder / f"running-{rank}"
    with contextlib.suppress(OSError):
        number, _, before, *_ = mark.read_text().split()
        now = _checksum(int(number))
        # then the pipe is readable, not broken; setproctitle also changes command lines
        has_failed = is_left(folder, f"failed-{rank}")
        if now != before and _UNKNOWN not in (now, before) and not has_failed:
            mark.unlink()
            return True
    return False


def _beginning(process_id: int) -> str:
    """Return the start time of a process; unknown if the process has ended.

    The start time distinguishes the process from a later one with the same number.
    """
    fields = proc.status_fields(process_id)
    return _UNKNOWN if fields[:1] in ([], ["Z"], ["X"]) else fields[19]


def _checksum(process_id: int) -> str:
    """Return a checksum of a process's command line; unknown while the process ends or calls exec."""
    words = proc.read(process_id, "cmdline")
    return str(zlib.crc32(words)) if words else _UNKNOWN


def _numbering() -> str:
    """Return a name for the process numbers that are valid here: of this boot and this container."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    return _UNKNOWN


class Failure(NamedTuple):
    """The failure of a rank."""

    when: float
    rank: int
    code: int
    report: str  # what is wrong with another rank because of which this rank ends the job; "" if this rank failed
    held: list[str]  # paths of its shared memory


def record_failure(folder: str, rank: int, code: int, report: str = "") -> None:
    """Record when this rank failed, its exit code, and its ``report``. Do nothing on another host."""
    if not folder or not os.path.isdir(folder):
        return
    # This rank may fail because it noticed that another rank is ending. A process that ends loses its memory first,
    # which may take a second for gigabytes, and only then breaks its pipe. Wait for that, so that the order is right.
    until = time.monotonic() + _ENDING_SECONDS
    while any(map(proc.is_ending, ranks_running(Path(folder)).values())) and time.monotonic() < until:
        time.sleep(0.01)
    # Then take this rank's place in the order in which ranks begin to end.
    with contextlib.suppress(OSError):
        pipe = os.open(os.path.join(folder, f"alive-{rank}"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(pipe, b"failed")
        os.close(pipe)
    with open("/proc/self/maps") as maps:
        paths = {line.split()[5] for line in maps if " /dev/shm/" in line and "(deleted)" not in line}
    first = f"{time.time():.6f} {code} {' '.join(report.split())}"
    leave(folder, f"failed-{rank}", "\n".join([first, *sorted(paths)]))


def failures(folder: Path) -> list[Failure]:
    """Return the failures of the ranks, in order of time."""
    recorded = []
    for path in folder.glob("failed-*"):
        first, *paths = path.read_text().splitlines()
        when, code, report = first.split(" ", 2)
        recorded.append(Failure(float(when), int(path.name.removeprefix("failed-")), int(code), report, paths))
    return sorted(recorded)


def code_of_end(folder: Path) -> int:
    """Return the exit code that ranks chose when the job was asked to end; 0 if none did."""
    return max((int(path.read_text()) for path in folder.glob("ended-*")), default=0)


def record_meeting() -> None:
    """Record that this rank, or the rank that started this process, begins to contact other ranks."""
    _leave_of_rank("met")


def _leave_of_rank(mark: str, text: str = "") -> None:
    """Leave a mark of this rank, or of the rank that started this process."""
    if (rank := variables.rank_in(os.environ)) is not None:
        leave(os.environ.get("TORCHMPIRUN_JOB_DIR", ""), f"{mark}-{rank}", text)


class Stage(NamedTuple):
    """The place of a living rank, and for how long all ranks may wait in such stages (0: without limit)."""

    call: str = ""  # call in which the rank waits for the others; "" while it runs its program
    seconds: float = 0.0
    ends: bool = False  # whether the job ends after that time
    progress: tuple[str, ...] = ()  # the CPU time of a rank in the shutdown of Python, which may be slow


def record_stage(stage: Stage) -> None:
    """Record the stage of this rank."""
    _leave_of_rank("stage", f"{os.getpid()} {stage.seconds:g} {stage.ends:d} {stage.call}")


def stage_of(folder: Path, rank: int, process_id: int) -> Stage:
    """Return the stage of a rank's process. Marks of a child process of the rank do not count."""
    with contextlib.suppress(OSError):
        number, seconds, ends, call = (folder / f"stage-{rank}").read_text().split(" ", 3)
        if int(number) == process_id:
            is_over, fields = is_left(folder, f"over-{rank}"), proc.status_fields(process_id)
            call = "the shutdown of Python" if is_over else call
            if fields[:1] in (["T"], ["t"]):
                call = f"{call or 'the program'}, stopped by a signal"
            return Stage(call, float(seconds), ends == "1", tuple(fields[11:13] if is_over else ()))
    return Stage()


def has_met() -> bool:
    """Return whether this process has contacted other ranks, as far as the process itself shows.

    It has if an MPI library is loaded, because mpi4py and this package load the library only to start MPI. It also has
    if torch.distributed has had a default group or its RPC.
    """
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    calls: Any = sys.modules.get("torch.distributed.rpc")
    has_grouped = getattr(groups, "_backend", None) is not None  # torch keeps this value after the group is destroyed
    return has_grouped or getattr(calls, "_init_counter", 0) > 0 or b"/libmpi" in proc.read("self", "maps")


def ranks_alone(folder: Path) -> list[int]:
    """Return the ranks that contacted no other rank, neither themselves nor by a child process."""
    alone = sorted(int(path.name.removeprefix("alone-")) for path in folder.glob("alone-*"))
    return [rank for rank in alone if not (folder / f"met-{rank}").exists()]


def explain_alone(ranks: list[int]) -> str:
    """Return torchmpirun's message about ranks that contacted no other rank."""
    subject = f"ranks {', '.join(map(str, ranks))} each ran" if len(ranks) > 1 else f"rank {ranks[0]} ran"
    return f"{subject} the whole program alone: it called neither mpi.start() nor init_process_group()"


def wait_for_output(descriptors: tuple[int, ...] = (1, 2)) -> None:
    """Wait until mpirun has had time to pass on this process's output, because an abort would overtake the output."""
    until = time.monotonic() + _UNREAD_SECONDS
    while any(map(_is_unread, descriptors)) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(_OUTPUT_SECONDS)


def _is_unread(descriptor: int) -> bool:
    """Return whether the descriptor is a pipe with bytes in it that a reader may still read."""
    with contextlib.suppress(OSError):  # the descriptor may be closed
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            ends = select.poll()
            ends.register(descriptor, 0)
            has_reader = not ends.poll(0)  # poll reports an error if the reader is gone
            return has_reader and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return False


def abort(mpi: Any, code: int) -> NoReturn:
    """End all ranks of the job by MPI_Abort; ``mpi`` is the module mpi4py.MPI, and MPI runs."""
    wait_for_output()
    # If mpirun cannot be reached, MPI_Abort waits for it and holds Python's lock. faulthandler needs no lock.
    with contextlib.suppress(Exception), open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(_STARTER_SECONDS, exit=True, file=os.dup(nowhere.fileno()))
    mpi.COMM_WORLD.Abort(code)
    # MPICH's MPI_Abort returns. Its mpirun is about to kill this process, and may fail to end the others if this
    # process ends first. Do not return to the program, which would call mpi.stop().
    time.sleep(_KILLED_SECONDS)
    os._exit(code)
