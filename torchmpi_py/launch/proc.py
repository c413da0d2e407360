"""What /proc shows of a process; nothing of one that has ended, or is another user's."""

import contextlib
import glob
import os
import re


def read(process: int | str, file: str) -> bytes:
    """The content of a file of the process ("self": this one)."""
    try:
        with open(f"/proc/{process}/{file}", "rb") as opened:
            return opened.read()
    except OSError:
        return b""


def open_files(process: int | str) -> list[str]:
    """What the process's descriptors stand for."""
    found: list[str] = []
    for path in glob.glob(f"/proc/{process}/fd/*"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.append(os.readlink(path))
    return found


def field(process: int | str, file: str, name: str) -> str:
    """The word after ``name:`` in a file of the process; "0" if not known."""
    found = re.search(rb"^%s:\s*(\S+)" % name.encode(), read(process, file), re.MULTILINE)
    return found[1].decode() if found else "0"


def status_fields(process: int | str) -> list[str]:
    """The fields from the state on, see proc(5)."""
    return read(process, "stat").decode(errors="replace").rpartition(")")[2].split()


def is_gone(process: int) -> bool:
    """Whether a process has ended, also before its parent has asked for its status."""
    return status_fields(process)[:1] in ([], ["Z"], ["X"])


def has_memory(process: int) -> bool:
    """Whether a process has memory of its own: it lives, and is none of the kernel's."""
    return field(process, "status", "VmSize") != "0"


def is_ending(process: int) -> bool:
    """Return whether the kernel is about to end a process: its memory has gone, and its descriptors are still there."""
    return not (has_memory(process) or is_gone(process))


def others() -> list[int]:
    """All processes except this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
