"""A lock on a folder of checkpoints, so that one job at a time saves into the folder. Only rank 0 takes the lock.

The lock is an flock on the file ``.lock`` in the folder. The kernel releases the lock when the process ends, even if
the process is killed. So a restarted job, or a rank that becomes rank 0 after a death, can take the lock. The file
remains, and contains a line that describes the last holder. If the file were removed while a job holds the lock,
another job could create and lock a new file.

Alternative: a POSIX lock (``lockf``). Why not: a process loses the lock as soon as any code of the process closes the
file, for example code that copies the folder. Forked children share an flock, so a DataLoader worker that outlives its
rank would keep the lock. Therefore children close their copy of the file. On NFS, Linux turns an flock into a lock of
the server. If the file system has no locks, or this user may not open the file, the job logs a warning and continues
without a lock.

All ``Checkpoints`` of a process that use one folder share its lock, until the last object is deleted.
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
"""Time that ``take`` waits, because a killed job, or a former rank 0, may need time to end."""
_MOST_BYTES = 4096  # maximum length of the line that describes the holder

warn_once = functools.cache(logging.getLogger("torchmpi_py").warning)
"""Log a warning, unless this process has already logged it."""


class FolderLock(io.FileIO):
    """The open lock file. The lock is released when the object is deleted."""

    def __del__(self) -> None:
        self.close()


_held: weakref.WeakValueDictionary[pathlib.Path, FolderLock] = weakref.WeakValueDictionary()


def take(directory: pathlib.Path) -> FolderLock | None:
    """Lock a folder for this process, and return the lock, or None if the folder cannot be locked.

    Raise BlockingIOError, which identifies the holder, if another process still holds the lock after ``SECONDS``.
    """
    path, deadline = pathlib.Path(os.path.realpath(directory), NAME), time.monotonic() + SECONDS
    lock = _held.get(path)
    if lock is not None and not lock.closed:  # In a forked child the lock is closed.
        return lock
    try:
        lock = FolderLock(trusted_files.open_file(path, os.O_RDWR | os.O_CREAT, owners=None), "r+")
        while not _is_taken(lock):
            if time.monotonic() > deadline:
                holder = printable(lock.read(_MOST_BYTES).decode(errors="replace")).strip() or "its process is unknown"
                what = f"another job saves into this folder ({holder}); end that job, or use another folder"
                raise BlockingIOError(errno.EWOULDBLOCK, what, str(path.parent))
            time.sleep(0.1)
        _name_holder(lock, path.parent)
    except BlockingIOError:
        raise
    except OSError as error:
        warn_once("%s cannot be locked (%s); make sure that no other job saves into this folder", path, error.strerror)
        return None
    _held[path] = lock
    return lock


def _is_taken(lock: FolderLock) -> bool:
    """Try to take the lock, and return whether this process has it now."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _name_holder(lock: FolderLock, directory: pathlib.Path) -> None:
    """Write a line that identifies this process into the lock file."""
    with contextlib.suppress(OSError):  # The file may belong to another user.
        os.fchmod(lock.fileno(), directory.stat().st_mode & 0o666)  # Users who may write into the folder may lock it.
    user, began = trusted_files.owner_name(os.geteuid()), time.strftime("%Y-%m-%d %H:%M:%S")
    lock.truncate(0)
    line = f"process {os.getpid()} of {user} on {socket.gethostname()}, {sys.argv[0]}, since {began}\n"
    lock.write(line.encode("utf-8", "backslashreplace"))


os.register_at_fork(after_in_child=lambda: list(map(FolderLock.close, list(_held.values()))))
