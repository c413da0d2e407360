"""The files of checkpoints. A kill at any moment leaves the last complete file intact. The module does not communicate.

::

    DIR/step-000120.pt                  A file gets this name when all of its content is on the disk.
    DIR/.step-000130.pt.partial-1f0c    A job is writing this file, or was killed while it wrote the file.
    DIR/step-000120.pt.damaged          This file could not be read, and was skipped.
    DIR/.lock                           The job that saves into DIR has locked this file (see ``folder_lock``).

A file gets its name by ``rename``, which is atomic. ``fsync`` writes the file to the disk before the rename, and the
folder after the rename. So ``step-N.pt`` is never an incomplete checkpoint, not even after a power failure. ``tidy``
removes the partial files of killed jobs.

A file consists of the bytes that ``torch.save`` writes, followed by their CRC-32 in four bytes. ``torch.load`` can read
the file. Alternative: rely on the zip archive of ``torch.save``, which has a CRC-32 for each entry. Why not: the ranks'
own parts are archives too, and ``zipfile`` would read one of these archives from a truncated file.

A file contains only plain data, which ``torch.load(weights_only=True)`` can read. From torch 2.6 on, reading does not
run code from the file. With an earlier torch, load only files whose author you trust.
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
"""Errors that do not prove that the file is damaged: another attempt, or another user, may be able to read the file."""
_NAME = re.compile(r"step-(\d+)\.pt")
_FORMER_NAME = re.compile(r"step-\d+")
_CRC_OF_WHOLE = 0x2144DF1C
"""The CRC-32 of any data followed by the CRC-32 of the data in little-endian order."""


class Damaged(Exception):  # noqa: N818 - the name describes the file
    """A checkpoint file does not contain the bytes that were written."""


def packed(content: Any, where: str = "checkpoint") -> memoryview:
    """Return the bytes of a file with this content. Raise TypeError for an entry that is not plain data.

    Only an attempt shows what ``torch.load`` can read, so this function loads the bytes, without the values of tensors.
    ``where`` is the name of the content in error messages.
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
            f"{where} is a {type(content).__qualname__}, which a checkpoint cannot contain; save tensors, numbers, "
            "strings, or lists, tuples, sets and dicts of these (for numpy, use torch.from_numpy(x))"
        ) from error
    return stream.getbuffer()


def compact(content: Any) -> Any:
    """Return the content with Python numbers instead of numpy's, and with copies instead of views of tensors.

    For a view, ``torch.save`` would write all the memory that the view belongs to.
    """
    if isinstance(content, torch.Tensor):
        is_part = content.layout is torch.strided and content.untyped_storage().nbytes() > content.nbytes
        return content.detach().clone() if is_part else content
    if isinstance(content, dict):
        result = copy.copy(content)  # This also copies attributes, such as a state_dict's versions.
        result.update({key: compact(value) for key, value in content.items()})
        return result
    if type(content) in (list, tuple):
        return type(content)(map(compact, content))
    return content.item() if isinstance(content, (np.number, np.bool_)) else content


def write(path: pathlib.Path, content: Any) -> None:
    """Write plain data under a provisional name; rename the file when it is on the disk. Raise OSError on failure."""
    data, partial = packed(content), path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.write(zlib.crc32(data).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, path)
    except OSError as error:
        error.filename = str(path)  # An error of write() has no file name.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync(path.parent)


def read(path: pathlib.Path) -> io.BytesIO:
    """Return the bytes of a file. Raise Damaged if the disk fails or if the checksum is wrong."""
    try:
        with open(trusted_files.open_file(path, os.O_RDONLY, owners=None), "rb") as file:
            data = file.read()
    except MemoryError as error:
        raise OSError(errno.ENOMEM, "the file exceeds the free memory; use a host with more RAM", str(path)) from error
    except OSError as error:
        if error.errno in _MAY_PASS:
            raise
        raise Damaged(error.strerror) from error
    if zlib.crc32(data) != _CRC_OF_WHOLE:
        raise Damaged("its checksum is wrong, so the file was changed, truncated, or not written by torchmpi_py")
    return io.BytesIO(data)


def unpacked(stream: io.BytesIO) -> Any:
    """Return the content of a file, on the CPU. From torch 2.6 on, this does not run code from the file."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises exceptions of many types, and their messages advise the user to run the code in the file.
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 80, placeholder=" ...")
        raise CheckpointError(f"the file is not a checkpoint of plain data ({why}); use another folder") from error


def make_folder(directory: pathlib.Path) -> None:
    """Create the folder of checkpoints, and flush its entry in the parent folder to the disk."""
    new_folders = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    os.makedirs(directory, exist_ok=True)
    for folder in new_folders:
        _sync(folder.parent)


def _sync(folder: pathlib.Path) -> None:
    """Flush the entries of the folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(directory: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """Return (step, path) of each complete checkpoint, newest first.

    Raise CheckpointError if the folder contains only checkpoints of torchmpi_py 0.1.
    """
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
    """Remove the partial files of killed jobs. The caller must have locked the folder."""
    for path in directory.glob(".step-*.pt.partial-*"):
        with contextlib.suppress(OSError):  # The file may belong to another user.
            path.unlink()


def discard(path: pathlib.Path, aside: pathlib.Path | None = None) -> None:
    """Remove a checkpoint, or rename it to ``aside``. Log a warning if this fails."""
    try:
        path.unlink() if aside is None else os.rename(path, aside)
    except FileNotFoundError:
        pass
    except OSError as error:
        warn_once("checkpoint %s cannot be removed or renamed (%s); remove it yourself", path, error.strerror)
