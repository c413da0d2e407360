"""Functions that read the state of a process from /proc.

If the process has ended, or if the user may not read the file, the results are empty (of `field`: "0").
"""

import contextlib
import glob
import os
import re


def read(process: int | str, file: str) -> bytes:
    """Return the content of a file in the process's folder ("self" for this process); empty if it cannot be read."""
    try:
        with open(f"/proc/{process}/{file}", "rb") as opened:
            return opened.read()
    except OSError:
        return b""


def open_files(process: int | str) -> list[str]:
    """Return the paths of the files that the process has open."""
    targets: list[str] = []
    for path in glob.glob(f"/proc/{process}/fd/*"):
        with contextlib.suppress(OSError):  # The process may have closed the descriptor.
            targets.append(os.readlink(path))
    return targets


def field(process: int | str, file: str, name: str) -> str:
    """Return the first word after ``name:`` in a file of the process; "0" if there is no such line."""
    match = re.search(rb"^%s:\s*(\S+)" % name.encode(), read(process, file), re.MULTILINE)
    return match[1].decode() if match else "0"


def status_fields(process: int | str) -> list[str]:
    """Return the fields of the file ``stat``, beginning with the process's state; see proc(5)."""
    return read(process, "stat").decode(errors="replace").rpartition(")")[2].split()


def is_gone(process: int) -> bool:
    """Return whether a process has ended, even if its parent has not read the exit status yet."""
    return status_fields(process)[:1] in ([], ["Z"], ["X"])


def has_memory(process: int) -> bool:
    """Return whether a process has an address space: it is alive, and not a kernel thread."""
    return field(process, "status", "VmSize") != "0"


def is_ending(process: int) -> bool:
    """Return whether the kernel is ending a process: its memory is gone, but its descriptors still exist."""
    return not (has_memory(process) or is_gone(process))


def others() -> list[int]:
    """Return the IDs of all processes except this process."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
