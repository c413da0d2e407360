"""Files that processes of one node open together, to share memory or locks.

A file has no name if possible: the other ranks open it through /proc. Where they cannot (each in a container of its
own) a file in /dev/shm takes its place. A killed rank leaves nothing behind: a name is removed before the file is used.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import secrets
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import Unavailable

T = TypeVar("T")
_WITHOUT_DESCRIPTOR: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # older ones keep one open
Identity = tuple[int, int]  # device and inode
Take = Callable[[str, Identity], tuple[T | None, str]]
Create = Callable[[int, contextlib.ExitStack], str]
SHARED_DIRECTORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def share(comm: MPI.Comm, creator: int, num_bytes: int, take: Take[T]) -> tuple[T, int]:
    """(what ``take`` makes here of a new file, a number that names it). Collective over ``comm``.

    Rank ``creator`` of ``comm`` creates it, for those that name the same one. ``take(path, identity)`` returns what it
    made, or None and the reason why not. Unavailable, on every rank, if it cannot be had by all.
    """
    reasons = []
    for create in (nameless, named):
        with contextlib.ExitStack() as until_taken:
            mine = offer(create, num_bytes, until_taken) if comm.rank == creator else None
            path, key, identity, reason = comm.allgather(mine)[creator]
            taken, reason = (None, reason) if reason else take(path, identity)
            failures = [text for text in comm.allgather(reason) if text]
        if taken is not None and not failures:
            return taken, key
        reasons.append(failures[0])
    raise Unavailable("; ".join(reasons))


def offer(create: Create, num_bytes: int, until_mapped: contextlib.ExitStack) -> tuple[str, int, tuple[int, int], str]:
    """(path, key, device and inode, why not) of a new file; the path exists until ``until_mapped`` is closed."""
    try:
        path = create(num_bytes, until_mapped)
        status = os.stat(path)
        return path, secrets.randbits(62), (status.st_dev, status.st_ino), ""
    except (OSError, OverflowError) as error:
        return "", 0, (0, 0), f"{_explain(error)} ({create.__doc__})"


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
        # Reserve the pages now: without room for them, a later store would end the process by a signal.
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)
    return path


def _explain(error: Exception) -> str:
    if getattr(error, "errno", None) != errno.EMFILE:
        return str(getattr(error, "strerror", None) or error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = "Raise it, or make fewer communicators and symmetric tensors (one tensor can be cut up)"
    return f"too many open files; the limit is {limit} (ulimit -n). {remedy}"


def _refuse(why: str) -> int:
    raise OSError(why)


def open_file(path: str, num_bytes: int, identity: Identity) -> tuple[int | None, str]:
    """The descriptor of a file, or why not. In another container the same path may lead to another file."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return None, f"cannot open {path}: {_explain(error)}"
    # Descriptor and path of another container may name a file that exists here too: its inode tells.
    status = os.fstat(file)
    if (status.st_dev, status.st_ino) == identity and status.st_size == num_bytes:
        return file, ""
    os.close(file)
    return None, f"cannot open {path}: it is another file here"


def map_file(path: str, num_bytes: int, identity: Identity) -> tuple[mmap.mmap | None, str]:
    """The mapping of a file, or why not."""
    file, reason = open_file(path, num_bytes, identity)  # open until it is mapped; a mapping needs no descriptor
    if file is None:
        return None, reason
    try:
        mapping = mmap.mmap(file, num_bytes, **_WITHOUT_DESCRIPTOR)
        with contextlib.suppress(OSError, AttributeError):
            mapping.madvise(mmap.MADV_HUGEPAGE)  # has an effect where the system allows shared memory large pages
        return mapping, ""
    except (OSError, OverflowError, ValueError) as error:
        return None, f"cannot map {path}: {_explain(error)}"
    finally:
        os.close(file)
