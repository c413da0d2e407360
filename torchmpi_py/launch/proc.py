"""Read what /proc shows of a process; empty for a process that has ended or belongs to another user."""

import contextlib
import glob
import os
import re


def read(process: int | str, file: str) -> bytes:
    """Return the content of a file of the process ("self" for this one)."""
    try:
        with open(f"/proc/{process}/{file}", "rb") as opened:
            return opened.read()
    except OSError:
        return b""


def open_files(process: int | str) -> list[str]:
    """Return the targets of the process's descriptors."""
    targets: list[str] = []
    for path in glob.glob(f"/proc/{process}/fd/*"):
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            targets.append(os.readlink(path))
    return targets


def field(process: int | str, file: str, name: str) -> str:
    """Return the word after ``name:`` in a file of the process; "0" if unknown."""
    match = re.search(rb"^%s:\s*(\S+)" % name.encode(), read(process, file), re.MULTILINE)
    return match[1].decode() if match else "0"


def status_fields(process: int | str) -> list[str]:
    """Return the fields from the state on; see proc(5)."""
    return read(process, "stat").decode(errors="replace").rpartition(")")[2].split()


def is_gone(process: int) -> bool:
    """Return whether a process has ended, even if its parent has not read its status yet."""
    return status_fields(process)[:1] in ([], ["Z"], ["X"])


def has_memory(process: int) -> bool:
    """Return whether a process has memory of its own: it lives, and is not a kernel thread."""
    return field(process, "status", "VmSize") != "0"


def is_ending(process: int) -> bool:
    """Return whether the kernel is ending a process: its memory is gone, but its descriptors still exist."""
    return not (has_memory(process) or is_gone(process))


def others() -> list[int]:
    """Return the numbers of all processes except this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
