"""A lock on a folder of checkpoints: one job at a time saves into it. No ranks: rank 0 takes the lock.

The lock is an flock on the file ``.lock`` in the folder. The kernel frees it when the process ends, however that ends,
so a job that is started again, or another rank that has become rank 0, finds it free. The file stays, with a line that
names the last holder: if it is removed while a job holds it, another job can lock a new file of that name.

Alternatives. A process loses a POSIX lock (``lockf``) as soon as anything in it closes the file, as a copy of the
folder does. A process shares an flock with its forked children instead, so a worker of a DataLoader that outlives its
rank would keep the lock: children close their copy. On NFS, Linux turns an flock into a lock of the server. Where the
file system has no locks, or this user may not open the file, the job goes on without a lock, after a warning.

A process has one lock for a folder, whatever the number of objects that use it, until the last of them is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import logging
import os
import pathlib
import socket
import sys
import time
import weakref

from torchmpi_py import trusted_files
from torchmpi_py.launch.notices import printable

NAME = ".lock"
SECONDS = 10.0
"""How long ``take`` waits: a job that was killed, or its former rank 0, may still be about to end."""
_MOST_BYTES = 4096  # of the line

warn_once = functools.cache(logging.getLogger("torchmpi_py").warning)
"""Log a warning, unless this process has logged the same one before."""


class FolderLock(io.FileIO):
    """The open lock file. The lock is free when the object is gone."""

    def __del__(self) -> None:
        self.close()


_held: weakref.WeakValueDictionary[pathlib.Path, FolderLock] = weakref.WeakValueDictionary()


def take(directory: pathlib.Path) -> FolderLock | None:
    """Return this process's lock on a folder; None where there are no locks.

    BlockingIOError that names the holder, if another process has the lock for longer than ``SECONDS``.
    """
    path, deadline = pathlib.Path(os.path.realpath(directory), NAME), time.monotonic() + SECONDS
    lock = _held.get(path)
    if lock is not None and not lock.closed:  # a forked child has closed it
        return lock
    try:
        lock = FolderLock(trusted_files.open_file(path, os.O_RDWR | os.O_CREAT, owners=None), "r+")
        while not _is_taken(lock):
            if time.monotonic() > deadline:
                holder = printable(lock.read(_MOST_BYTES).decode(errors="replace")).strip() or "its name is not known"
                what = f"another job saves into this folder ({holder}); end that job, or give this one another folder"
                raise BlockingIOError(errno.EWOULDBLOCK, what, str(path.parent))
            time.sleep(0.1)
        _name_holder(lock, path.parent)
    except BlockingIOError:
        raise
    except OSError as error:
        warn_once("%s cannot be locked (%s): make sure that no other job saves there", path, error.strerror)
        return None
    _held[path] = lock
    return lock


def _is_taken(lock: FolderLock) -> bool:
    """Try to take the lock; whether no other process has it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _name_holder(lock: FolderLock, directory: pathlib.Path) -> None:
    """Write into the file who holds the lock."""
    with contextlib.suppress(OSError):  # another user's file
        os.fchmod(lock.fileno(), directory.stat().st_mode & 0o666)  # who may write into the folder may lock it
    user, began = trusted_files.owner_name(os.geteuid()), time.strftime("%Y-%m-%d %H:%M:%S")
    lock.truncate(0)
    line = f"process {os.getpid()} of {user} on {socket.gethostname()}, {sys.argv[0]}, since {began}\n"
    lock.write(line.encode("utf-8", "backslashreplace"))


os.register_at_fork(after_in_child=lambda: list(map(FolderLock.close, list(_held.values()))))
