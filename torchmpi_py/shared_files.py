"""Files that processes of one node map together, to share memory.

Best without a name, opened through /proc by the others; where they cannot open it so (each in a container of its own)
a file in /dev/shm takes its place. Nothing is left behind when a rank is killed: the name, if there was one, is gone
before the memory is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable

Create = Callable[[int, contextlib.ExitStack], str]
SHARED_DIRECTORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def offer(create: Create, num_bytes: int, until_mapped: contextlib.ExitStack) -> tuple[str, int, tuple[int, int], str]:
    """(path, key, device and inode, reason why not) of a new file, there until the stack is closed."""
    try:
        path = create(num_bytes, until_mapped)
        status = os.stat(path)
        return path, secrets.randbits(62), (status.st_dev, status.st_ino), ""
    except (OSError, OverflowError) as error:
        return "", 0, (0, 0), f"{getattr(error, 'strerror', None) or error} ({create.__doc__})"


def nameless(num_bytes: int, until_mapped: contextlib.ExitStack) -> str:
    """A nameless file."""
    file = os.memfd_create("torchmpi_py") if hasattr(os, "memfd_create") else _refuse("this system has no memfd_create")
    until_mapped.callback(os.close, file)
    os.ftruncate(file, num_bytes)
    return f"/proc/{os.getpid()}/fd/{file}"


def named(num_bytes: int, until_mapped: contextlib.ExitStack) -> str:
    """A file in /dev/shm; give a container more with --shm-size or --ipc=host."""
    file, path = tempfile.mkstemp(prefix="torchmpi_py_", dir=SHARED_DIRECTORY)
    until_mapped.callback(os.unlink, path)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)
    return path


def _refuse(why: str) -> int:
    raise OSError(why)


def map_file(path: str, num_bytes: int, identity: tuple[int, int]) -> tuple[mmap.mmap | None, str]:
    """The mapping of a file, or why not: in another container the same path may lead to another file."""
    try:
        file = os.open(path, os.O_RDWR)
        try:
            status = os.fstat(file)
            if (status.st_dev, status.st_ino) != identity or status.st_size != num_bytes:
                return None, f"cannot map {path}: it is another file here"
            mapping = mmap.mmap(file, num_bytes)
            with contextlib.suppress(OSError, AttributeError):
                mapping.madvise(mmap.MADV_HUGEPAGE)  # taken where the system lets shared memory have large pages
            return mapping, ""
        finally:
            os.close(file)
    except (OSError, OverflowError, ValueError) as error:
        return None, f"cannot map {path}: {getattr(error, 'strerror', None) or error}"
