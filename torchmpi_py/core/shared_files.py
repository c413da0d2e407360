"""Files that processes of one node open together, to share memory or locks.

If possible, a file has no name, and the other ranks open it through /proc. If they cannot, because each rank is in its
own container, a file in /dev/shm replaces the nameless file. Its name is removed once all ranks have opened it. So a
rank that is killed later leaves no file behind.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import resource
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchmpi_py.core import agree
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import Unavailable

T = TypeVar("T")
# Before Python 3.13, a mapping keeps a descriptor of its file open.
_WITHOUT_DESCRIPTOR: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}
Identity = tuple[int, int]  # device and inode
Take = Callable[[str, Identity], T]
Create = Callable[[int, contextlib.ExitStack], str]
Offer = tuple[str, int, Identity]  # path, a random number that identifies the file, identity
SHARED_DIRECTORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def share(comm: MPI.Comm, creator: int, num_bytes: int, take: Take[T], ways: Sequence[Create] = ()) -> tuple[T, int]:
    """Create a file that every rank opens; return (result of ``take`` on this rank, number that identifies the file).

    All ranks of ``comm`` must make this call. Rank ``creator`` creates the file for all ranks that pass the same
    ``creator``. ``take(path, identity)`` opens the file, and returns a result or raises Unavailable. ``ways`` are
    functions that create a file (default ``WAYS``), which are tried one after another; every rank must pass the same
    number of them. Raise Unavailable on every rank if each of the functions fails on some rank.
    """
    reasons = []
    for create in ways or WAYS:
        with contextlib.ExitStack() as until_taken:
            try:
                return _share(comm, creator, functools.partial(offer, create, num_bytes, until_taken), take)
            except Unavailable as error:
                reasons.append(str(error))
    raise Unavailable("; ".join(reasons))


def _share(comm: MPI.Comm, creator: int, make: Callable[[], Offer], take: Take[T]) -> tuple[T, int]:
    def offered() -> Offer | None:
        return make() if comm.rank == creator else None

    how = (Unavailable,), str, agree.first_as(Unavailable)
    # The ranks need only the creator's offer, but an error on any rank must reach all ranks.
    of_creator = agree.gather_results(comm.allgather, offered, *how)[creator]
    assert of_creator is not None, "the creator offers a file"
    path, key, identity = of_creator
    result = agree.run_on_all_ranks(comm.allgather, lambda: take(path, identity), *how)
    return result, key


def offer(create: Create, num_bytes: int, until_mapped: contextlib.ExitStack) -> Offer:
    """Create a file by calling ``create``, and return the file's path, a random number, and its device and inode.

    ``create`` may register the removal of the file with ``until_mapped``. Raise Unavailable if the file cannot be
    created.
    """
    try:
        path = create(num_bytes, until_mapped)
        status = os.stat(path)
        return path, secrets.randbits(62), (status.st_dev, status.st_ino)
    except (OSError, OverflowError) as error:
        raise Unavailable(f"{_explain(error)} (failed step: {create.__doc__})") from None


def nameless(num_bytes: int, until_mapped: contextlib.ExitStack) -> str:
    """Create a file without a name."""
    file = os.memfd_create("torchmpi_py") if hasattr(os, "memfd_create") else _refuse("this system has no memfd_create")
    until_mapped.callback(os.close, file)
    os.ftruncate(file, num_bytes)
    return f"/proc/{os.getpid()}/fd/{file}"


def named(num_bytes: int, until_mapped: contextlib.ExitStack) -> str:
    """Create a file in /dev/shm; a container gets more space there with --shm-size or --ipc=host."""
    file, path = tempfile.mkstemp(prefix="torchmpi_py_", dir=SHARED_DIRECTORY)
    until_mapped.callback(os.unlink, path)
    try:
        # Reserve the pages now. If there were no space for them later, a store would end the process by a signal.
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)
    return path


WAYS: tuple[Create, ...] = (nameless, named)


def kept(path: str) -> Create:
    """Return a function that creates a file at ``path``, which stays after the job.

    The new file replaces an older file at ``path``. Processes that have mapped the older file can still use it.
    """

    def create(num_bytes: int, _: contextlib.ExitStack) -> str:
        """Create a file that stays after the job."""
        file, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
        try:
            os.posix_fallocate(file, 0, num_bytes)  # Reserve the pages, as in ``named``.
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        finally:
            os.close(file)
        return path

    return create


def _explain(error: Exception) -> str:
    if getattr(error, "errno", None) != errno.EMFILE:
        return str(getattr(error, "strerror", None) or error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = "Raise the limit, or create fewer communicators and symmetric tensors (split a large one into views)"
    return f"too many open files; the limit is {limit} (ulimit -n). {remedy}"


def _refuse(why: str) -> int:
    raise OSError(why)


def open_file(path: str, num_bytes: int, identity: Identity) -> int:
    """Open a file and return its descriptor. Raise Unavailable if it cannot be opened, or is not the expected file."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"cannot open {path}: {_explain(error)}") from None
    # In another container the same path may lead to a different file, which has another inode.
    status = os.fstat(file)
    if (status.st_dev, status.st_ino) == identity and status.st_size == num_bytes:
        return file
    os.close(file)
    raise Unavailable(f"cannot open {path}: it is another file on this rank; the ranks may be in separate containers")


def map_file(path: str, num_bytes: int, identity: Identity) -> mmap.mmap:
    """Map a file into memory. Raise Unavailable if the file cannot be mapped."""
    file = open_file(path, num_bytes, identity)
    try:
        mapping = mmap.mmap(file, num_bytes, **_WITHOUT_DESCRIPTOR)
        with contextlib.suppress(OSError, AttributeError):
            mapping.madvise(mmap.MADV_HUGEPAGE)  # This works only if the system allows huge pages in shared memory.
        return mapping
    except (OSError, OverflowError, ValueError) as error:
        raise Unavailable(f"cannot map {path}: {_explain(error)}") from None
    finally:
        os.close(file)
