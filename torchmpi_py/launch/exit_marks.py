"""Marks: files that ranks leave in the job's folder for torchmpirun. A mark is there whole, or not at all.

running-R  until rank R ends in order: its process, where that number holds (another host, or a container with process
           numbers of its own, may share the folder), a checksum of its command line, and when it began
alive-R    a pipe that rank R holds open until it ends, and writes into when it fails
failed-R   rank R failed: when, with which exit code, what it reported of another rank, and the shared memory it held
through-R  rank R's program returned; what runs at exit may still be to come
stage-R    where rank R is from its first ``mpi.stop()`` on, and how long it may wait there (`Stage`)
over-R     running-R under another name, once rank R has run all that its program had registered for its exit
alone-R    rank R ended in order, and met no other rank
met-R      rank R, or a process that it started, came to meet other ranks
heard-R    Ctrl-C reached rank R's program
own-R      rank R's program has had a handler of its own for Ctrl-C, which leaves no ``heard-R``
ended-R    rank R ended because the job was asked to end, in agreement with all ranks: its exit code
ending     torchmpirun's own: it passes on a signal that asks the job to end
remains    torchmpirun's own: what is to be cleared away if it is killed (`cleanup`)
guard-P    process P, torchmpirun or its guardian, clears the folder away; in the form of ``running-R``

Where the disk is full marks are missing, and the job ends all the same. At the end of this file stands the abort of the
job by a rank that fails.
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

# How long the starter may take to read what a rank has written, such as a traceback, and to pass it on. Together, and
# with the second by which Open MPI delays aborts under srun, less than job.FAILURE_GRACE_SECONDS, after which
# torchmpirun ends a job in which a rank has failed.
_UNREAD_SECONDS = 1.5
_OUTPUT_SECONDS = 0.3
_UNKNOWN = "unknown"
_STARTER_SECONDS = 10.0  # how long MPI_Abort itself may take
_KILLED_SECONDS = 2.0  # how long the starter may take to kill a rank that has called MPI_Abort


def leave(folder: str | Path, mark: str, text: str = "") -> bool:
    """Leave a mark; whether that was possible: on another host there is no such folder, and a disk may be full."""
    if folder and os.path.isdir(folder):
        with contextlib.suppress(OSError):
            part = Path(folder) / f"part-{mark}"
            part.write_text(text)
            part.rename(part.with_name(mark))
            return True
    return False


def is_left(folder: str | Path, mark: str) -> bool:
    """Whether a mark is there; False on another host, where nothing is known of the marks."""
    return bool(folder) and os.path.exists(os.path.join(folder, mark))


@contextlib.contextmanager
def running(folder: str, rank: int) -> Iterator[None]:
    """Leave ``running-R`` until this process ends in order, and ``through-R`` at the end of the block.

    When the process ends in order it leaves ``alone-R`` as well, if it has not met another rank.

    A process that ends while its mark is there did not reach the end: it was killed, aborted, or called os._exit. MPICH
    takes os._exit(0) on one rank for success. What runs at exit, ``mpi.stop`` for instance, is before the end: the
    block begins before the program can register anything.
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
        held = _moved_up(os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        os.register_at_fork(after_in_child=lambda: os.close(held))
    record(folder, f"running-{rank}", process_id)
    atexit.register(end_in_order)  # the first to be registered runs last
    try:
        yield
    finally:
        if os.getpid() == process_id:
            leave(folder, f"through-{rank}")


def _moved_up(descriptor: int) -> int:
    """The same file under a high number: of a process that ends Linux closes the highest ones first.

    The starter learns of the end by a connection with a low number, and ends the other ranks: their pipes must not be
    the first to break.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError):
        number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, (min(limit, 1024) if limit > 0 else 1024) - 32)
        os.close(descriptor)
        return number
    return descriptor


def record(folder: str, mark: str, process_id: int) -> None:
    """Leave a mark that names a process: that it is a rank, say."""
    leave(folder, mark, f"{process_id} {_numbering()} {_checksum(process_id)} {_beginning(process_id)}")


def ranks_running(folder: Path, mark: str = "running") -> dict[int, int]:
    """Process of each rank that has not ended in order, or has that ``mark``; 0 for one that has no number here."""
    return {int(rank): process_id for rank, process_id, _ in _processes(folder, mark)}


def processes_of_ranks(folder: Path) -> set[int]:
    """The ranks' processes that live here, by number and beginning: one that has set its title has no environment."""
    marks = (*_processes(folder, "running"), *_processes(folder, "over"))
    return {process_id for _, process_id, lives in marks if lives}


def is_abandoned(folder: str) -> bool:
    """Whether the processes that clear a job's folder away have left marks, and all of them have ended."""
    with contextlib.suppress(OSError, ValueError):  # not a job's folder
        found = {bool(process_id) and not lives for _, process_id, lives in _processes(folder, "guard")}
        return found == {True}
    return False


def _processes(folder: str | Path, kind: str) -> Iterator[tuple[str, int, bool]]:
    """For each mark of a kind: the end of its name, the process (0: it has no number here), and whether that lives."""
    for path in Path(folder).glob(f"{kind}-*"):
        with contextlib.suppress(FileNotFoundError):
            number, where, _, *began = path.read_text().split()
            process_id = int(number) if where == _numbering() != _UNKNOWN else 0
            yield path.name.removeprefix(f"{kind}-"), process_id, began == [_beginning(process_id)] != [_UNKNOWN]


def open_pipe(folder: Path, rank: int) -> int:
    """The reading end of a rank's pipe: broken when the rank has begun to end, readable when it has failed."""
    return os.open(folder / f"alive-{rank}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def is_held(pipe: int) -> bool:
    """Whether a rank holds the other end. A failure stays readable: one of its bytes is enough."""
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(pipe, 1))
    return True


def release_replaced(folder: Path, rank: int) -> bool:
    """Remove the mark of a rank that has become another program (exec), and return whether that is so.

    To be asked of a rank whose pipe is broken: exec closes it. The program's end is a matter of the MPI alone.
    """
    mark = folder / f"running-{rank}"
    with contextlib.suppress(OSError):
        number, _, before, *_ = mark.read_text().split()
        now = _checksum(int(number))
        has_failed = is_left(folder, f"failed-{rank}")  # that pipe is readable; setproctitle changes command lines too
        if now != before and _UNKNOWN not in (now, before) and not has_failed:
            mark.unlink()
            return True
    return False


def _beginning(process_id: int) -> str:
    """When a process began, which tells it from a later one of its number; not known of one that has ended."""
    fields = proc.status_fields(process_id)
    return _UNKNOWN if fields[:1] in ([], ["Z"], ["X"]) else fields[19]


def _checksum(process_id: int) -> str:
    """Checksum of a process's command line; not known when the process ends, or is about to become another program."""
    words = proc.read(process_id, "cmdline")
    return str(zlib.crc32(words)) if words else _UNKNOWN


def _numbering() -> str:
    """Name of the numbers of processes that hold here: those of this start of the system, and of this container."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    return _UNKNOWN


class Failure(NamedTuple):
    """The failure of a rank."""

    when: float
    rank: int
    code: int
    report: str  # what is wrong with another rank, where this rank ends the job for it; "" where this rank failed
    held: list[str]  # shared memory


def record_failure(folder: str, rank: int, code: int, report: str = "") -> None:
    """Leave when this rank failed, with which code, and its ``report``; on another host there is no such folder."""
    if not folder or not os.path.isdir(folder):
        return
    # A rank that is ending loses its memory first, which this rank may have noticed. The kernel may take a second for
    # gigabytes of memory, and breaks the rank's pipe then.
    until = time.monotonic() + _UNREAD_SECONDS
    while any(map(proc.is_ending, ranks_running(Path(folder)).values())) and time.monotonic() < until:
        time.sleep(0.01)
    # Then the place of the failure in the order in which ranks begin to end.
    with contextlib.suppress(OSError):
        pipe = os.open(os.path.join(folder, f"alive-{rank}"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(pipe, b"failed")
        os.close(pipe)
    with open("/proc/self/maps") as maps:
        held = {line.split()[5] for line in maps if " /dev/shm/" in line and "(deleted)" not in line}
    first = f"{time.time():.6f} {code} {' '.join(report.split())}"
    leave(folder, f"failed-{rank}", "\n".join([first, *sorted(held)]))


def failures(folder: Path) -> list[Failure]:
    """The ranks that failed, in order of time."""
    found = []
    for path in folder.glob("failed-*"):
        first, *held = path.read_text().splitlines()
        when, code, report = first.split(" ", 2)
        found.append(Failure(float(when), int(path.name.removeprefix("failed-")), int(code), report, held))
    return sorted(found)


def code_of_end(folder: Path) -> int:
    """The code that ranks want the job to end with, because it was asked to end; 0 if none does."""
    return max((int(path.read_text()) for path in folder.glob("ended-*")), default=0)


def record_meeting() -> None:
    """Leave that this rank, or the rank which this process comes from, comes to meet others."""
    _leave_of_rank("met")


def _leave_of_rank(mark: str, text: str = "") -> None:
    """Leave a mark of this rank, or of the rank which this process comes from."""
    if (rank := variables.rank_in(os.environ)) is not None:
        leave(os.environ.get("TORCHMPIRUN_JOB_DIR", ""), f"{mark}-{rank}", text)


class Stage(NamedTuple):
    """Where a rank is that lives, and how long all ranks may wait for each other in such stages (0: for ever)."""

    call: str = ""  # in which the rank waits for the others; "" where it runs code of its program
    seconds: float = 0.0
    ends: bool = False  # whether the job ends after that time
    progress: tuple[str, ...] = ()  # the CPU time of a rank in the shutdown of Python, which may be slow


def record_stage(stage: Stage) -> None:
    """Leave that this rank is in this stage."""
    _leave_of_rank("stage", f"{os.getpid()} {stage.seconds:g} {stage.ends:d} {stage.call}")


def stage_of(folder: Path, rank: int, process_id: int) -> Stage:
    """Where this process of a rank is. The marks of another process, which the rank has started, do not count."""
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
    """Whether this process has met other ranks, as far as the process itself shows.

    It has if an MPI library is loaded, for mpi4py and this package load one no sooner than they start it, or if
    torch.distributed has had a default group, or its RPC.
    """
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    calls: Any = sys.modules.get("torch.distributed.rpc")
    has_grouped = getattr(groups, "_backend", None) is not None  # torch keeps it when the group is destroyed
    return has_grouped or getattr(calls, "_init_counter", 0) > 0 or b"/libmpi" in proc.read("self", "maps")


def ranks_alone(folder: Path) -> list[int]:
    """The ranks that have met no other rank, neither in their process nor in one that it started."""
    found = sorted(int(path.name.removeprefix("alone-")) for path in folder.glob("alone-*"))
    return [rank for rank in found if not (folder / f"met-{rank}").exists()]


def explain_alone(ranks: list[int]) -> str:
    """What torchmpirun says of ranks that met no other rank."""
    who = f"ranks {', '.join(map(str, ranks))} each ran" if len(ranks) > 1 else f"rank {ranks[0]} ran"
    return f"{who} the whole program alone: it called neither mpi.start() nor init_process_group()"


def wait_for_output(descriptors: tuple[int, ...] = (1, 2)) -> None:
    """Give the starter the time to pass on what this process has written, which an abort would overtake."""
    until = time.monotonic() + _UNREAD_SECONDS
    while any(map(_is_unread, descriptors)) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(_OUTPUT_SECONDS)


def _is_unread(descriptor: int) -> bool:
    """Whether this is a pipe with bytes in it that its other end may yet read."""
    with contextlib.suppress(OSError):  # it may be closed
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            ends = select.poll()
            ends.register(descriptor, 0)
            has_reader = not ends.poll(0)  # else there is an error to tell
            return has_reader and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return False


def abort(mpi: Any, code: int) -> NoReturn:
    """End all ranks of the job by MPI_Abort; ``mpi`` is the module mpi4py.MPI, of an MPI that runs."""
    wait_for_output()
    # Where the starter cannot be reached MPI_Abort waits for it, with Python's lock: faulthandler needs no lock.
    with contextlib.suppress(Exception), open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(_STARTER_SECONDS, exit=True, file=os.dup(nowhere.fileno()))
    mpi.COMM_WORLD.Abort(code)
    # MPICH's returns. Its starter is about to kill this process, and may fail to end the others if this one ends first;
    # one that went on meanwhile would go through mpi.stop().
    time.sleep(_KILLED_SECONDS)
    os._exit(code)
