"""Marks: files in the job's folder, through which the ranks and torchmpirun exchange information.

Files work where the MPI does not: they need no connection, and they remain when a rank is killed. Each mark is written
under a different name and then renamed, so a reader never sees an incomplete mark. R is a rank, P a process.

- running-R: rank R has not ended normally yet. Contains its process ID, the PID namespace of this ID (another host or
  container may share the folder), a checksum of its command line, and its start time.
- alive-R: a pipe that rank R keeps open until it ends. Rank R writes into the pipe when it fails.
- failed-R: rank R has failed. Contains the time, the exit code, the problem that rank R reported on another rank, and
  the paths of rank R's shared memory.
- through-R: rank R's program has returned; functions registered with atexit may still run.
- stage-R: the last call in which rank R waits for the other ranks, such as ``mpi.stop()``, and the limit for this wait
  (`Stage`).
- over-R: the former running-R, renamed when all functions that rank R's program registered with atexit have returned.
- alone-R: rank R ended normally without contacting another rank.
- met-R: rank R, or a process that rank R started, began to contact other ranks.
- heard-R: Ctrl-C reached rank R's program.
- own-R: rank R's program has installed its own handler for Ctrl-C, which does not write ``heard-R``.
- ended-R: rank R ended because all ranks agreed to end the job on request. Contains the exit code of rank R.
- ending: torchmpirun sends the ranks a signal that requests the end of the job.
- remains: the processes and files that must be removed if torchmpirun is killed (`cleanup`).
- guard-P: process P, torchmpirun or its guardian, will remove the folder. Has the same content as ``running-R``.

torchmpirun writes the last three marks, and the ranks write the others. If the disk is full, some marks are missing,
but the job still ends. The last function in this file, `abort`, ends the job from a rank that fails.
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

# Time for mpirun to read a rank's output, such as a traceback, and time to print it. torchmpirun ends the job when
# job.FAILURE_GRACE_SECONDS have passed since a failure. These two times, plus the second by which Open MPI delays an
# abort under srun, must add up to less.
_UNREAD_SECONDS = 1.5
_OUTPUT_SECONDS = 0.3
_ENDING_SECONDS = 1.5  # limit for the kernel to free the memory of a rank that is ending (`record_failure`)
_UNKNOWN = "unknown"
_STARTER_SECONDS = 10.0  # limit for MPI_Abort itself
_KILLED_SECONDS = 2.0  # limit for mpirun to kill a rank that has called MPI_Abort


def leave(folder: str | Path, mark: str, text: str = "") -> bool:
    """Write a mark, and return whether the write succeeded.

    The folder does not exist on other hosts, and the disk may be full.
    """
    if folder and os.path.isdir(folder):
        with contextlib.suppress(OSError):
            part = Path(folder) / f"part-{mark}"
            part.write_text(text)
            part.rename(part.with_name(mark))
            return True
    return False


def is_left(folder: str | Path, mark: str) -> bool:
    """Return whether a mark exists; False on another host, which has no access to the folder."""
    return bool(folder) and os.path.exists(os.path.join(folder, mark))


@contextlib.contextmanager
def running(folder: str, rank: int) -> Iterator[None]:
    """Keep ``running-R`` until this process ends normally, and write ``through-R`` at the end of the block.

    A process that ends normally without having contacted another rank also writes ``alone-R``.

    If ``running-R`` remains, the process did not end normally: it was killed, it aborted, or it called os._exit. The
    mark is needed because MPICH treats os._exit(0) on one rank as success. Functions that the program registers with
    atexit, such as ``mpi.stop``, are still part of the run. This block begins before the program can register any
    function, so the function below, which renames ``running-R``, runs last.
    """
    if not folder or not os.path.isdir(folder):
        yield
        return
    mark, process_id = Path(folder) / f"running-{rank}", os.getpid()

    def end_in_order() -> None:
        with contextlib.suppress(OSError):
            if os.getpid() == process_id:  # A forked child is not the rank.
                if not has_met():
                    leave(folder, f"alone-{rank}")
                mark.rename(mark.with_name(f"over-{rank}"))

    with contextlib.suppress(OSError):
        pipe = mark.with_name(f"alive-{rank}")
        os.mkfifo(pipe)
        pipe_end = _moved_up(os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        os.register_at_fork(after_in_child=lambda: os.close(pipe_end))
    record(folder, f"running-{rank}", process_id)
    atexit.register(end_in_order)  # The function that is registered first runs last.
    try:
        yield
    finally:
        if os.getpid() == process_id:
            leave(folder, f"through-{rank}")


def _moved_up(descriptor: int) -> int:
    """Move the descriptor to a high number, because Linux closes high descriptors first at exit.

    When the rank's connection to mpirun breaks, mpirun kills the other ranks. The connection has a lower number. So the
    pipe of this rank breaks before the connection does, and before the pipes of the ranks that mpirun kills.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError):
        number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, (min(limit, 1024) if limit > 0 else 1024) - 32)
        os.close(descriptor)
        return number
    return descriptor


def record(folder: str, mark: str, process_id: int) -> None:
    """Write a mark that identifies a process by ID, PID namespace, command line and start time."""
    leave(folder, mark, f"{process_id} {_numbering()} {_checksum(process_id)} {_beginning(process_id)}")


def ranks_running(folder: Path, mark: str = "running") -> dict[int, int]:
    """Return the process ID of each rank that has this ``mark``; 0 for a process in another PID namespace."""
    return {int(rank): process_id for rank, process_id, _ in _processes(folder, mark)}


def processes_of_ranks(folder: Path) -> set[int]:
    """Return the process IDs of the ranks that are alive in this PID namespace.

    The ranks are identified by their marks, because a rank that has set its process title hides its environment.
    """
    marks = (*_processes(folder, "running"), *_processes(folder, "over"))
    return {process_id for _, process_id, lives in marks if lives}


def is_abandoned(folder: str) -> bool:
    """Return whether all processes that were to remove a job's folder have ended; False if there are no marks."""
    with contextlib.suppress(OSError, ValueError):  # The folder may not belong to a job.
        guards = {bool(process_id) and not lives for _, process_id, lives in _processes(folder, "guard")}
        return guards == {True}
    return False


def _processes(folder: str | Path, kind: str) -> Iterator[tuple[str, int, bool]]:
    """Yield X, the process ID, and whether the process is alive, for each mark ``kind-X``.

    The process ID is 0 if the process is in another PID namespace.
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
    """Return whether a rank keeps the other end of the pipe open.

    If a failing rank has written its message, this function reads one byte of the message. The other bytes keep the
    pipe readable.
    """
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(pipe, 1))
    return True


def release_replaced(folder: Path, rank: int) -> bool:
    """Remove the mark of a rank that executes another program (exec); return whether the mark was removed.

    Call this function for a rank whose pipe is broken, because exec closes the pipe. The end of the new program
    concerns only the MPI.
    """
    mark = folder / f"running-{rank}"
    with contextlib.suppress(OSError):
        number, _, before, *_ = mark.read_text().split()
        now = _checksum(int(number))
        # The pipe of a failed rank has an event although it is not broken. The rank may have changed its command line
        # by setproctitle, without exec, so do not treat a failed rank as another program.
        has_failed = is_left(folder, f"failed-{rank}")
        if now != before and _UNKNOWN not in (now, before) and not has_failed:
            mark.unlink()
            return True
    return False


def _beginning(process_id: int) -> str:
    """Return the start time of a process, or ``_UNKNOWN`` if the process has ended.

    The start time distinguishes the process from a later process with the same ID.
    """
    fields = proc.status_fields(process_id)
    return _UNKNOWN if fields[:1] in ([], ["Z"], ["X"]) else fields[19]


def _checksum(process_id: int) -> str:
    """Return a checksum of a process's command line, or ``_UNKNOWN`` while the process ends or calls exec."""
    words = proc.read(process_id, "cmdline")
    return str(zlib.crc32(words)) if words else _UNKNOWN


def _numbering() -> str:
    """Return a name of this PID namespace that is unique across hosts, reboots and containers."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    return _UNKNOWN


class Failure(NamedTuple):
    """The failure of a rank: time, exit code, and shared memory of the rank."""

    when: float
    rank: int
    code: int
    report: str  # problem on another rank because of which this rank ends the job; "" if this rank itself failed
    held: list[str]  # paths of the rank's shared memory


def record_failure(folder: str, rank: int, code: int, report: str = "") -> None:
    """Record a failure of this rank: the time, the exit code and ``report``.

    Do nothing on a host without the job's folder.
    """
    if not folder or not os.path.isdir(folder):
        return
    # This rank may fail because another rank is ending. The kernel first frees the memory of a process that is ending,
    # which may take a second for gigabytes, and then closes its pipe. Wait for the pipe of the other rank to break, so
    # that the order of the failures is right.
    until = time.monotonic() + _ENDING_SECONDS
    while any(map(proc.is_ending, ranks_running(Path(folder)).values())) and time.monotonic() < until:
        time.sleep(0.01)
    # Write into this rank's pipe, so that epoll reports this failure in order with the deaths of other ranks.
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
    """Return the exit code with which the ranks ended on request; 0 if no rank has ended on request."""
    return max((int(path.read_text()) for path in folder.glob("ended-*")), default=0)


def record_meeting() -> None:
    """Record that this process begins to contact other ranks, as a rank or as a child process of a rank."""
    _leave_of_rank("met")


def _leave_of_rank(mark: str, text: str = "") -> None:
    """Write a mark for this rank, or for the rank of which this process is a child."""
    if (rank := variables.rank_in(os.environ)) is not None:
        leave(os.environ.get("TORCHMPIRUN_JOB_DIR", ""), f"{mark}-{rank}", text)


class Stage(NamedTuple):
    """The call in which a living rank waits for the other ranks, and the limit for this wait."""

    call: str = ""  # Name of the call; "" while the rank runs its program.
    seconds: float = 0.0  # Limit for a wait of all ranks in such calls. 0 means no limit.
    ends: bool = False  # Whether the job ends after the limit.
    progress: tuple[str, ...] = ()  # CPU time of a rank that is in the shutdown of Python, which may be slow.


def record_stage(stage: Stage) -> None:
    """Write the mark ``stage-R`` for this rank."""
    _leave_of_rank("stage", f"{os.getpid()} {stage.seconds:g} {stage.ends:d} {stage.call}")


def stage_of(folder: Path, rank: int, process_id: int) -> Stage:
    """Return the stage of a rank, or an empty stage if ``process_id`` did not write the mark.

    A child process of the rank may have written the mark.
    """
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
    """Return whether this process has contacted other ranks, judging by its modules and libraries.

    A process with an MPI library has done so, because mpi4py and this package load the library only to start MPI. A
    process that has used torch.distributed's default group or RPC has done so too.
    """
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    calls: Any = sys.modules.get("torch.distributed.rpc")
    has_grouped = getattr(groups, "_backend", None) is not None  # Torch keeps this value after the group is destroyed.
    return has_grouped or getattr(calls, "_init_counter", 0) > 0 or b"/libmpi" in proc.read("self", "maps")


def ranks_alone(folder: Path) -> list[int]:
    """Return the ranks that ended normally and contacted no other rank, neither directly nor in a child process."""
    alone = sorted(int(path.name.removeprefix("alone-")) for path in folder.glob("alone-*"))
    return [rank for rank in alone if not (folder / f"met-{rank}").exists()]


def explain_alone(ranks: list[int]) -> str:
    """Return torchmpirun's message about ranks that contacted no other rank."""
    subject = f"ranks {', '.join(map(str, ranks))} each ran" if len(ranks) > 1 else f"rank {ranks[0]} ran"
    return f"{subject} the whole program alone; to connect the ranks, call mpi.start() or init_process_group()"


def wait_for_output(descriptors: tuple[int, ...] = (1, 2)) -> None:
    """Wait until mpirun has had time to print this process's output, because an abort may discard the output."""
    until = time.monotonic() + _UNREAD_SECONDS
    while any(map(_is_unread, descriptors)) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(_OUTPUT_SECONDS)


def _is_unread(descriptor: int) -> bool:
    """Return whether the descriptor is a pipe that contains bytes and still has a reader."""
    with contextlib.suppress(OSError):  # The descriptor may be closed.
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            ends = select.poll()
            ends.register(descriptor, 0)
            has_reader = not ends.poll(0)  # The poll reports an error if the reader is gone.
            return has_reader and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return False


def abort(mpi: Any, code: int) -> NoReturn:
    """End all ranks of the job with MPI_Abort and the exit code ``code``.

    ``mpi`` is the module mpi4py.MPI. MPI must be initialized.
    """
    wait_for_output()
    # If mpirun cannot be reached, MPI_Abort waits for mpirun and keeps Python's GIL. faulthandler can end this process
    # without the GIL.
    with contextlib.suppress(Exception), open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(_STARTER_SECONDS, exit=True, file=os.dup(nowhere.fileno()))
    mpi.COMM_WORLD.Abort(code)
    # MPICH's MPI_Abort returns before mpirun kills this process. If this process ended first, mpirun might fail to kill
    # the other ranks. So wait for mpirun here, and never return to the program, which would call mpi.stop().
    time.sleep(_KILLED_SECONDS)
    os._exit(code)
