"""Safe access to files at paths where another user, or another job, may have put something else.

`read` and `open_file` refuse anything that is not a regular file, files of other users, and files that are too large.
They refuse such a file before the process can block on it, for example on a named pipe, a device, or a link into
another user's folder. They raise `OSError`, and its ``strerror`` contains the reason and the remedy. Callers that
handle unreadable files therefore need no further code. For reading, a link is followed if it belongs to the user or to
root, like the links in a home directory. For writing, no link is followed. The parent folders may be links.

A file system may give new files a different owner than the process. For example, NFS does this with root's files. Files
of this other owner count as the user's.

This module imports only the standard library, because `launch` uses it and must start without torch.
"""

import contextlib
import errno
import json
import os
import pwd
import stat
import tempfile
from collections.abc import Collection
from typing import Any

Path = str | os.PathLike[str]

REMEDY = "move it away, or use another file"
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read(path: Path, most_bytes: int, *, owners: Collection[int] | None = (), remedy: str = REMEDY) -> bytes:
    """Return the content of a regular file of at most ``most_bytes``.

    Args:
        path: path of the file.
        most_bytes: the largest accepted size in bytes.
        owners: ids of users whose files are accepted in addition to the user's and root's files. None accepts any
            owner; pass None only if the user has chosen the file and its content cannot do harm.
        remedy: text at the end of the error.

    Raises:
        OSError: the file is missing, unreadable or refused.

    """
    with open(open_file(path, os.O_RDONLY, owners=owners, remedy=remedy), "rb") as file:
        # A file that grows after this check is still read only up to the limit.
        if (num_bytes := os.fstat(file.fileno()).st_size) > most_bytes:
            what = f"it has {num_bytes} bytes, but the limit is {most_bytes}"
            raise OSError(errno.EFBIG, f"{what}; {remedy}", os.fspath(path))
        return file.read(most_bytes)


def read_json(path: Path, most_bytes: int = 1 << 20, *, owners: Collection[int] | None = ()) -> Any:
    """Return the content of a JSON file. Raise OSError as `read` does, and ValueError if the file is not JSON."""
    try:
        return json.loads(read(path, most_bytes, owners=owners))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def open_file(path: Path, flags: int, *, owners: Collection[int] | None = (), remedy: str = REMEDY) -> int:
    """Open a regular file, and return its descriptor. Raise OSError as `read` does.

    O_CREAT creates a missing file. O_TRUNC empties the file only after all checks have passed. A file with a second
    name (a hard link) is refused for writing.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    with contextlib.suppress(FileNotFoundError):  # ``os.open`` below reports a missing file.
        _check(path, os.lstat(path), owners, writes, remedy)
        _check(path, os.stat(path), owners, writes, remedy)
    no_follow = os.O_NOFOLLOW if writes else 0
    descriptor = os.open(path, flags & ~os.O_TRUNC | no_follow | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    try:
        # Check again, because another file may have replaced the checked file before it was opened.
        _check(path, os.fstat(descriptor), owners, writes, remedy)
        os.set_blocking(descriptor, True)
        if flags & os.O_TRUNC:
            os.truncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_own(path: Path) -> bool:
    """Return whether a file, folder or link exists and belongs to the user."""
    try:
        owner = os.lstat(path).st_uid
        return owner == os.geteuid() or owner == _owner_of_new_file(path)
    except OSError:
        return False


def write(path: Path, text: str) -> None:
    """Write a text to a new file or to one of the user's files. Raise OSError as `read` does."""
    with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)


def refuse_others(path: Path, remedy: str = REMEDY) -> None:
    """Raise PermissionError if the file, folder or link at ``path`` belongs to another user."""
    if os.path.lexists(path) and not is_own(path):
        what = f"it belongs to {owner_name(os.lstat(path).st_uid)}, not to you"
        raise PermissionError(errno.EPERM, f"{what}; {remedy}", os.fspath(path))


def owner_name(user_id: int) -> str:
    """Return the name of a user, or the number if the user has no name."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user {user_id}"


def _check(path: Path, status: os.stat_result, owners: Collection[int] | None, writes: bool, remedy: str) -> None:
    """Raise OSError unless the file or the link may be opened."""
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind and (writes or not stat.S_ISLNK(status.st_mode)):
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file; {remedy}", os.fspath(path))
    is_trusted = status.st_uid in (0, os.geteuid()) or owners is None or status.st_uid in owners
    if not is_trusted and status.st_uid != _owner_of_new_file(path):
        what = f"it is {kind or 'a file'} that belongs to {owner_name(status.st_uid)}, not to you or root"
        raise PermissionError(errno.EPERM, f"{what}; {remedy}", os.fspath(path))
    if writes and status.st_nlink > 1:
        raise PermissionError(errno.EPERM, f"it has a second name (a hard link); {remedy}", os.fspath(path))


def _owner_of_new_file(path: Path) -> int:
    """Return the user id that owns a new file in the folder of ``path``; -1 if this process cannot create a file."""
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path))) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return -1
