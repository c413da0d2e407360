"""Opening of files at paths where another user, or another job, may have put something else.

`read` and `open_file` refuse anything that is not a regular file, files of other users, and files that are too large.
They refuse before anything waits for the file, such as a named pipe, a device, or a link into another user's folder.
The `OSError` that they raise has a ``strerror`` that says what is wrong and what to do, so callers that handle
unreadable files handle these too. For reading, a link is followed if it belongs to the user or to root, as links in a
home directory do. For writing, no link is followed. Folders on the way to the file may be links.

A file system may give new files another owner than the process, as NFS does with files of root. Files with that owner
count as the user's.

Only the standard library is imported here, because `launch` and the rooms above it use this module.
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

REMEDY = "remove it, or name another file"
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
        owners: user ids whose files are also accepted, besides the user's and root's. None accepts any owner; use it
            only if the user has named the file and its content cannot do harm.
        remedy: text at the end of the error.

    Raises:
        OSError: the file is missing, unreadable or refused.

    """
    with open(open_file(path, os.O_RDONLY, owners=owners, remedy=remedy), "rb") as file:
        # A file that grows meanwhile is read up to its former end.
        if (num_bytes := os.fstat(file.fileno()).st_size) > most_bytes:
            what = f"it has {num_bytes} bytes, but the limit is {most_bytes}"
            raise OSError(errno.EFBIG, f"{what}; {remedy}", os.fspath(path))
        return file.read(most_bytes)


def read_json(path: Path, most_bytes: int = 1 << 20, *, owners: Collection[int] | None = ()) -> Any:
    """Return the content of a JSON file. Raise OSError as `read` does, ValueError for a file that is not JSON."""
    try:
        return json.loads(read(path, most_bytes, owners=owners))
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None


def open_file(path: Path, flags: int, *, owners: Collection[int] | None = (), remedy: str = REMEDY) -> int:
    """Return the descriptor of a regular file. Raise OSError as `read` does; O_CREAT creates a missing file.

    O_TRUNC empties the file after the examination. A file with a second name (a hard link) is refused for writing.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    with contextlib.suppress(FileNotFoundError):  # os.open reports a missing file.
        _check(path, os.lstat(path), owners, writes, remedy)
        _check(path, os.stat(path), owners, writes, remedy)
    no_follow = os.O_NOFOLLOW if writes else 0
    descriptor = os.open(path, flags & ~os.O_TRUNC | no_follow | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    try:
        _check(path, os.fstat(descriptor), owners, writes, remedy)  # Again, as another file may have taken the name.
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
    """Write a text to a new file or to a file of the user's. Raise OSError as `read` does."""
    with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)


def refuse_others(path: Path, remedy: str = REMEDY) -> None:
    """Raise PermissionError if the file, folder or link at ``path`` is another user's; call before a removal."""
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
        what = f"it is {kind or 'a file'} of {owner_name(status.st_uid)}, not yours or root's"
        raise PermissionError(errno.EPERM, f"{what}; {remedy}", os.fspath(path))
    if writes and status.st_nlink > 1:
        raise PermissionError(errno.EPERM, f"it has a second name (a hard link); {remedy}", os.fspath(path))


def _owner_of_new_file(path: Path) -> int:
    """Return the owner of a new file of this process in the folder of ``path``; -1 if it cannot create one."""
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path))) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return -1
