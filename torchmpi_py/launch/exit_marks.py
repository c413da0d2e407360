"""What ranks leave in the job's folder for torchmpirun, each as a file that is there whole, or not at all.

running-R  until rank R has ended in order: its process, and where that number holds (another host, or a container with
           numbers of its own, may see the same folder)
alive-R    a pipe that the rank holds open until it ends; it writes into it when it fails
failed-R   that rank R failed: when, with which exit code, and which shared memory it held
alone-R    that rank R's process ended in order, without having met the others (`alone`)
met-R      that rank R, or a process it has started, came to meet others
heard-R    that Ctrl-C has reached rank R's program
own-R      that rank R's program has had a handler of its own for Ctrl-C, which leaves no such mark
ended-R    that rank R ended because the job was asked to end, in agreement with all ranks; its exit code

torchmpirun itself leaves ``ending`` when it passes on a signal that asks the job to end. Where the disk is full marks
are missing, and the job ends all the same.

Whether a rank has met the others of its job by the time it ends, as far as its own process shows.

It has if an MPI library is loaded, for mpi4py and this package load one no sooner than they start it, or if
torch.distributed has had a default group, or its RPC. A process that it has started may meet others in its place, and
leaves a mark (`marks.record_meeting`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchmpi_py.launch import variables


class Failure(NamedTuple):
    """How a rank failed."""

    when: float
    rank: int
    code: int
    held: list[str]  # shared memory


def record_failure(folder: str, rank: int, code: int) -> None:
    """Leave for torchmpirun when this rank failed and with which code; on another host there is no such folder."""
    if not folder or not os.path.isdir(folder):
        return
    _break_pipe(Path(folder), rank)
    with open("/proc/self/maps") as maps:
        held = {line.split()[5] for line in maps if " /dev/shm/" in line and "(deleted)" not in line}
    _write(Path(folder) / f"failed-{rank}", "\n".join([f"{time.time():.6f} {code}", *sorted(held)]))


def _break_pipe(folder: Path, rank: int) -> None:
    """Have a failure take its place in the order in which ranks begin to end."""
    with contextlib.suppress(OSError):
        pipe = os.open(folder / f"alive-{rank}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(pipe, b"failed")
        os.close(pipe)


def failures(folder: Path) -> list[Failure]:
    """The ranks that failed, in order of time."""
    found = []
    for path in folder.glob("failed-*"):
        first, *held = path.read_text().splitlines()
        when, code = first.split()
        found.append(Failure(float(when), int(path.name.removeprefix("failed-")), int(code), held))
    return sorted(found)


def announce_end(folder: Path) -> None:
    """torchmpirun: the job is asked to end, and a rank that has done so must not take the time from the others."""
    with contextlib.suppress(OSError):
        _write(folder / "ending", "")


def is_ending(folder: str) -> bool:
    """Whether the job is asked to end; on another host that is not known."""
    return bool(folder) and os.path.exists(os.path.join(folder, "ending"))


def record_hearing(folder: str, rank: int) -> None:
    """Leave for torchmpirun that Ctrl-C has reached this rank's program."""
    _leave(folder, f"heard-{rank}")


def has_heard(folder: Path, rank: int) -> bool:
    """Whether Ctrl-C has reached this rank's program."""
    return (folder / f"heard-{rank}").exists()


def record_meeting() -> None:
    """Leave for torchmpirun that this rank, or the rank which this process comes from, comes to meet others."""
    rank = variables.rank_in(os.environ)
    if rank is not None:
        _leave(os.environ.get("TORCHMPIRUN_JOB_DIR", ""), f"met-{rank}")


def record_alone(folder: str, rank: int) -> None:
    """Leave for torchmpirun that this rank's process has met no other rank."""
    _leave(folder, f"alone-{rank}")


def ranks_alone(folder: Path) -> list[int]:
    """The ranks whose process has met no other rank, and of whose other processes none has either."""
    found = sorted(int(path.name.removeprefix("alone-")) for path in folder.glob("alone-*"))
    return [rank for rank in found if not (folder / f"met-{rank}").exists()]


def record_own_handler(folder: str, rank: int) -> None:
    """Leave for torchmpirun that the program handles Ctrl-C, and that its hearing cannot be seen."""
    _leave(folder, f"own-{rank}")


def has_own_handler(folder: Path, rank: int) -> bool:
    """Whether this rank's program has had a handler of its own for Ctrl-C."""
    return (folder / f"own-{rank}").exists()


def record_end(folder: str, rank: int, code: int) -> bool:
    """Leave for torchmpirun the code that this rank wants the job to end with; whether torchmpirun will read it."""
    return _leave(folder, f"ended-{rank}", str(code))


def code_of_end(folder: Path) -> int:
    """The code that ranks want the job to end with, because it was asked to end; 0 if none does."""
    return max((int(path.read_text()) for path in folder.glob("ended-*")), default=0)


@contextlib.contextmanager
def running(folder: str, rank: int) -> Iterator[None]:
    """Leave the mark until the process has ended in order, or becomes another program (exec).

    Whoever ends with the mark still there did not reach the end: it was killed, or called os._exit, or was aborted.
    MPICH takes os._exit(0) on one rank for success. What runs at exit, ``mpi.stop`` for instance, is before the end:
    this has to be entered before the program can register anything.
    """
    if not folder or not os.path.isdir(folder):
        yield
        return
    mark = Path(folder) / f"running-{rank}"
    process_id = os.getpid()

    def leave() -> None:
        with contextlib.suppress(OSError):
            _write(mark, f"{process_id} {_numbering()}")

    def remove() -> bool:
        with contextlib.suppress(OSError):
            if os.getpid() == process_id:  # a forked child is not the rank
                mark.unlink()
                return True
        return False

    with contextlib.suppress(OSError):
        pipe = mark.with_name(f"alive-{rank}")
        os.mkfifo(pipe)
        held = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        os.register_at_fork(after_in_child=lambda: os.close(held))
    leave()
    os.execv = _without(os.execv, remove, leave)  # the other six are made of these two
    os.execve = _without(os.execve, remove, leave)
    atexit.register(remove)  # the first to be registered runs last
    end_at_once, has_ended = os._exit, False

    def end(status: int) -> NoReturn:
        if has_ended and status == 0:  # a way to leave out what others have registered
            remove()
        end_at_once(status)

    os._exit = end
    try:
        yield
    finally:
        has_ended = True


def _without(function: Callable[..., Any], remove: Callable[[], bool], leave: Callable[[], None]) -> Callable[..., Any]:
    """The function, called when the mark is removed; if it returns after all, by an error, that is left again."""

    def both(*args: Any) -> Any:
        was_there = remove()
        try:
            return function(*args)
        finally:
            if was_there:
                leave()

    return both


def ranks_running(folder: Path) -> dict[int, int]:
    """Ranks whose mark is there, and their processes; 0 for one that has no number here."""
    found = {}
    for path in folder.glob("running-*"):
        with contextlib.suppress(FileNotFoundError):
            number, where = path.read_text().split()
            found[int(path.name.removeprefix("running-"))] = int(number) if where == _numbering() else 0
    return found


def open_pipe(folder: Path, rank: int) -> int:
    """The reading end of a rank's pipe: broken when the rank has begun to end, readable when it has failed."""
    return os.open(folder / f"alive-{rank}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def is_running(folder: Path, rank: int) -> bool:
    """Whether this rank's mark is there."""
    return (folder / f"running-{rank}").exists()


def _numbering() -> str:
    """Processes of equal numbering are known to each other by the same numbers."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    return "unknown"


def _leave(folder: str, name: str, text: str = "") -> bool:
    """Leave a mark; whether that was possible: on another host there is no such folder, and a disk may be full."""
    if not folder or not os.path.isdir(folder):
        return False
    with contextlib.suppress(OSError):
        _write(Path(folder) / name, text)
        return True
    return False


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"part-{path.name}")
    part.write_text(text)
    part.rename(path)


def note_at_end(folder: str, rank: int) -> None:
    """Leave the mark ``alone-R`` in the job's folder when this process ends in order without having met anybody."""
    process_id = os.getpid()

    def note() -> None:
        with contextlib.suppress(Exception):
            if os.getpid() == process_id and not has_met():  # a forked child is not the rank
                record_alone(folder, rank)

    atexit.register(note)


def explain(found: list[int]) -> str:
    """That these ranks did not meet the others."""
    names = ", ".join(map(str, found))
    who = f"ranks {names} each ran" if len(found) > 1 else f"rank {names} ran"
    return f"{who} the whole program alone: it called neither mpi.start() nor init_process_group()"


def has_met() -> bool:
    """Whether this process has met others."""
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    calls: Any = sys.modules.get("torch.distributed.rpc")
    has_grouped = getattr(groups, "_backend", None) is not None  # torch keeps it when the group is destroyed
    return has_grouped or getattr(calls, "_init_counter", 0) > 0 or _has_loaded_mpi()


def _has_loaded_mpi() -> bool:
    with open("/proc/self/maps") as maps:
        return any("/libmpi" in line for line in maps)
