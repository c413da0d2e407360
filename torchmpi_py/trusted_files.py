"""Open files at paths where another user, or another job, may have put something else.

`read` and `open_file` refuse what is not a regular file, what belongs to another user, and what is too large, before
anything waits for it: a named pipe, a device, a link into another user's folder. They raise an `OSError` whose
``strerror`` says what was found and what to do, so that callers which handle a file that cannot be read handle these
too. A link is followed for reading if it belongs to the user or to root, as the links of a home directory do, and never
for writing. Folders on the way to the file may be links.

A file system may give new files another owner than the process has, as NFS does with the files of root. Files with that
owner are the user's as well.

Only the standard library is imported here: `launch` uses this module, and the rooms above it do.
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
        path: the file.
        most_bytes: a larger file is refused.
        owners: user ids whose files are read too, beside those of the user and of root; None: anybody's, which is right
            where the user has named the file, and its content cannot do harm.
        remedy: the end of the error's text.

    Raises:
        OSError: the file is missing, or cannot be read, or is refused.

    """
    with open(open_file(path, os.O_RDONLY, owners=owners, remedy=remedy), "rb") as file:
        # A file that grows meanwhile is read to its former end.
        if (num_bytes := os.fstat(file.fileno()).st_size) > most_bytes:
            what = f"it has {num_bytes} bytes, and may have {most_bytes}"
            raise OSError(errno.EFBIG, f"{what}; {remedy}", os.fspath(path))
        return file.read(most_bytes)


def read_json(path: Path, most_bytes: int = 1 << 20, *, owners: Collection[int] | None = ()) -> Any:
    """Return the content of a JSON file. OSError as of `read`, ValueError for what is not JSON."""
    try:
        return json.loads(read(path, most_bytes, owners=owners))
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None


def open_file(path: Path, flags: int, *, owners: Collection[int] | None = (), remedy: str = REMEDY) -> int:
    """Return the descriptor of a regular file. OSError as of `read`; with O_CREAT a missing file is created.

    O_TRUNC empties the file after it was examined. A file with a second name (a hard link) is not written to.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    with contextlib.suppress(FileNotFoundError):  # which is for os.open to tell
        _check(path, os.lstat(path), owners, writes, remedy)
        _check(path, os.stat(path), owners, writes, remedy)
    no_follow = os.O_NOFOLLOW if writes else 0
    descriptor = os.open(path, flags & ~os.O_TRUNC | no_follow | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    try:
        _check(path, os.fstat(descriptor), owners, writes, remedy)  # once more: another file may have taken the name
        os.set_blocking(descriptor, True)
        if flags & os.O_TRUNC:
            os.truncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_own(path: Path) -> bool:
    """Whether a file, folder or link is there and belongs to the user."""
    try:
        owner = os.lstat(path).st_uid
        return owner == os.geteuid() or owner == _owner_of_new_file(path)
    except OSError:
        return False


def write(path: Path, text: str) -> None:
    """Write a text to a file that is the user's, or new. OSError as of `read`."""
    with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)


def refuse_others(path: Path, remedy: str = REMEDY) -> None:
    """PermissionError if another user's file, folder or link is at ``path``, so that it is not removed or replaced."""
    if os.path.lexists(path) and not is_own(path):
        what = f"it belongs to {owner_name(os.lstat(path).st_uid)}, and not to you"
        raise PermissionError(errno.EPERM, f"{what}; {remedy}", os.fspath(path))


def owner_name(user_id: int) -> str:
    """The name of a user, or the number where there is no name."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user {user_id}"


def _check(path: Path, found: os.stat_result, owners: Collection[int] | None, writes: bool, remedy: str) -> None:
    """OSError unless the file, or the link, may be opened."""
    kind = _KINDS.get(stat.S_IFMT(found.st_mode))
    if kind and (writes or not stat.S_ISLNK(found.st_mode)):
        raise OSError(errno.EINVAL, f"it is {kind}, and not a regular file; {remedy}", os.fspath(path))
    is_trusted = found.st_uid in (0, os.geteuid()) or owners is None or found.st_uid in owners
    if not is_trusted and found.st_uid != _owner_of_new_file(path):
        what = f"it is {kind or 'a file'} of {owner_name(found.st_uid)}, and not yours or root's"
        raise PermissionError(errno.EPERM, f"{what}; {remedy}", os.fspath(path))
    if writes and found.st_nlink > 1:
        raise PermissionError(errno.EPERM, f"it has another name, so it may be another file; {remedy}", os.fspath(path))


def _owner_of_new_file(path: Path) -> int:
    """Return the owner of a file that this process creates in the folder of ``path``; -1 where it cannot."""
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path))) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return -1
