"""The files of checkpoints, written so that a kill at any moment leaves the last complete one. No ranks are involved.

::

    DIR/step-000120.pt                  A complete file gets this name when all its content is on the disk.
    DIR/.step-000130.pt.partial-1f0c    This file is being written, or a killed job left it.
    DIR/step-000120.pt.damaged          This file could not be read, and was skipped.
    DIR/.lock                           The job that saves here has locked this file (``folder_lock``).

A file gets its name by ``rename``, which is atomic. Before the rename, ``fsync`` brings the file to the disk; after
the rename, it brings the folder to the disk. So the name ``step-N.pt`` never belongs to half a checkpoint, not even
after a power failure. ``tidy`` removes what a killed job left.

A file consists of the bytes of ``torch.save``, and four bytes with the CRC-32 of all bytes before. ``torch.load`` can
read it. Alternative: the zip archive of ``torch.save`` has a CRC-32 for each entry. Why not: the ranks' own parts are
archives too, and ``zipfile`` would read one of these from a truncated file.

A file holds plain data, which ``torch.load(weights_only=True)`` can read. From torch 2.6 on, this runs no code of the
file. With an earlier torch, load only files whose author you trust.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import pathlib
import re
import textwrap
import uuid
import zlib
from typing import Any

import numpy as np
import torch

from torchmpi_py import trusted_files
from torchmpi_py.engine.folder_lock import warn_once
from torchmpi_py.errors import CheckpointError

_MAY_PASS = {errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOMEM, errno.EPERM, errno.ESTALE}
"""Errors of reading that do not mean damage: another attempt, or another user, may be able to read the file."""
_NAME = re.compile(r"step-(\d+)\.pt")
_FORMER_NAME = re.compile(r"step-\d+")
_CRC_OF_WHOLE = 0x2144DF1C
"""The CRC-32 of any bytes that are followed by their own CRC-32, the lowest byte first."""


class Damaged(Exception):  # noqa: N818 - the name describes the file
    """A checkpoint file differs from what was written."""


def packed(content: Any, where: str = "checkpoint") -> memoryview:
    """Return the bytes of a file with this content. Raise TypeError, which names the entry, if it is not plain data.

    Only ``torch.load`` knows what it can read, so the content is read here again, without the values of tensors.
    """
    stream = io.BytesIO()
    try:
        torch.save(content, stream)
        stream.seek(0)
        torch.load(stream, map_location="meta", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        is_list = isinstance(content, (list, tuple))
        for key, value in enumerate(content) if is_list else getattr(content, "items", tuple)():
            packed(value, f"{where}[{key!r}]")
        raise TypeError(
            f"{where} is a {type(content).__qualname__}, which a checkpoint cannot hold: it can hold tensors, numbers, "
            "strings, and lists, tuples, sets and dicts of these (numpy: use torch.from_numpy(x))"
        ) from error
    return stream.getbuffer()


def compact(content: Any) -> Any:
    """Return the content with Python numbers in place of numpy's, and with tensors that own their memory.

    ``torch.save`` would write all of the memory that a view belongs to.
    """
    if isinstance(content, torch.Tensor):
        is_part = content.layout is torch.strided and content.untyped_storage().nbytes() > content.nbytes
        return content.detach().clone() if is_part else content
    if isinstance(content, dict):
        result = copy.copy(content)  # This keeps the attributes, such as the versions of a state_dict.
        result.update({key: compact(value) for key, value in content.items()})
        return result
    if type(content) in (list, tuple):
        return type(content)(map(compact, content))
    return content.item() if isinstance(content, (np.number, np.bool_)) else content


def write(path: pathlib.Path, content: Any) -> None:
    """Write plain data under a provisional name, and rename the file when it is on the disk. OSError means failure."""
    data, partial = packed(content), path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.write(zlib.crc32(data).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, path)
    except OSError as error:
        error.filename = str(path)  # An error of write() does not name the file.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync(path.parent)


def read(path: pathlib.Path) -> io.BytesIO:
    """Return the bytes of a file. Raise Damaged if they are not the bytes that were written."""
    try:
        with open(trusted_files.open_file(path, os.O_RDONLY, owners=None), "rb") as file:
            data = file.read()
    except MemoryError as error:
        raise OSError(errno.ENOMEM, "it is larger than the free memory", str(path)) from error
    except OSError as error:
        if error.errno in _MAY_PASS:
            raise
        raise Damaged(error.strerror) from error
    if zlib.crc32(data) != _CRC_OF_WHOLE:
        raise Damaged("its checksum is wrong: it was truncated or changed, or torchmpi_py did not write it")
    return io.BytesIO(data)


def unpacked(stream: io.BytesIO) -> Any:
    """Return the content of a file, on the CPU. From torch 2.6 on, no code of the file runs."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises exceptions of many types, and their messages advise the user to run the code in the file.
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 80, placeholder=" ...")
        raise CheckpointError(f"it does not hold the plain data of a checkpoint ({why})") from error


def make_folder(directory: pathlib.Path) -> None:
    """Create the folder of checkpoints, and bring its name to the disk."""
    new_folders = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    os.makedirs(directory, exist_ok=True)
    for folder in new_folders:
        _sync(folder.parent)


def _sync(folder: pathlib.Path) -> None:
    """Bring the folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(directory: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """Return (step, file) of each complete checkpoint, the newest first. Raise CheckpointError for files of 0.1."""
    names = os.listdir(directory) if directory.exists() else []
    steps = sorted(
        ((int(match[1]), directory / name) for name in names if (match := _NAME.fullmatch(name))), reverse=True
    )
    if not steps and (former := next(filter(_FORMER_NAME.fullmatch, names), None)):
        raise CheckpointError(
            f"{directory / former} is a checkpoint of torchmpi_py 0.1, which this version cannot read: continue with "
            "0.1, or use another folder"
        )
    return steps


def tidy(directory: pathlib.Path) -> None:
    """Remove partial files of a job that was killed. Call it only while you hold the folder's lock."""
    for path in directory.glob(".step-*.pt.partial-*"):
        with contextlib.suppress(OSError):  # The file may belong to another user.
            path.unlink()


def discard(path: pathlib.Path, aside: pathlib.Path | None = None) -> None:
    """Remove a checkpoint, or rename it to ``aside``. If that fails, log a warning; the next save tries again."""
    try:
        path.unlink() if aside is None else os.rename(path, aside)
    except FileNotFoundError:
        pass
    except OSError as error:
        warn_once("the checkpoint %s cannot be removed or renamed: %s", path, error.strerror)
