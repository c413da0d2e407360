"""The files of checkpoints: how one is written so that a kill at any point leaves the last complete one. No ranks.

::

    DIR/step-000120.pt                  complete: it got this name when everything in it was on the disk
    DIR/.step-000130.pt.partial-1f0c    being written, or left by a job that was killed then
    DIR/step-000120.pt.damaged          could not be read, and was passed over
    DIR/.lock                           locked by the job that saves here (``folder_lock``)

A name changes by ``rename``, which is atomic; before it the file is brought to the disk by ``fsync``, and after it the
folder is. So the name ``step-N.pt`` is never seen on half a checkpoint, not even after a power failure. ``tidy``
removes what a killed job left.

A file is what ``torch.save`` writes, then four bytes: the CRC-32 of what precedes. ``torch.load`` reads it as it is.
Alternative: the zip archive of ``torch.save`` has a CRC-32 for each entry, but the own parts of ranks are archives too,
and of a file that was cut off ``zipfile`` would read one of these.

A file holds plain data: what ``torch.load(weights_only=True)`` reads back. That runs no code of the file from torch 2.6
on; with an earlier torch, load only files whose author you trust.
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
"""Errors of reading that do not mean damage: the file may be read at another time, or by another user."""
_NAME = re.compile(r"step-(\d+)\.pt")
_FORMER_NAME = re.compile(r"step-\d+")
_CRC_OF_WHOLE = 0x2144DF1C
"""The CRC-32 of any bytes that are followed by their own CRC-32, the lowest byte first."""


class Damaged(Exception):  # noqa: N818 - the name says the state
    """A checkpoint is not as it was written."""


def packed(content: Any, where: str = "checkpoint") -> memoryview:
    """Return the bytes of a file that holds this content. TypeError, with the place of the entry that is no plain data.

    Only ``torch.load`` knows what it reads back, so the content is read back here, without its numbers.
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
            f"{where} is a {type(content).__qualname__} that a checkpoint does not hold: it holds tensors, numbers, "
            "strings, and lists, tuples, sets and dicts of them (numpy: torch.from_numpy(x))"
        ) from error
    return stream.getbuffer()


def compact(content: Any) -> Any:
    """Return the content with numpy's numbers as Python's, and with tensors that are no part of a larger memory.

    ``torch.save`` would write all of the memory that a view lies in.
    """
    if isinstance(content, torch.Tensor):
        is_part = content.layout is torch.strided and content.untyped_storage().nbytes() > content.nbytes
        return content.detach().clone() if is_part else content
    if isinstance(content, dict):
        copied = copy.copy(content)  # with its attributes: a state_dict's versions
        copied.update({key: compact(value) for key, value in content.items()})
        return copied
    if type(content) in (list, tuple):
        return type(content)(map(compact, content))
    return content.item() if isinstance(content, (np.number, np.bool_)) else content


def write(path: pathlib.Path, content: Any) -> None:
    """Write plain data under a provisional name, and give it its name when it is on the disk. OSError if that fails."""
    data, partial = packed(content), path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.write(zlib.crc32(data).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, path)
    except OSError as error:
        error.filename = str(path)  # an error of write does not know it
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync(path.parent)


def read(path: pathlib.Path) -> io.BytesIO:
    """Return the bytes of a file. Damaged unless they are as they were written."""
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
        raise Damaged("its checksum is another: it was cut off or changed, or torchmpi_py has not written it")
    return io.BytesIO(data)


def unpacked(stream: io.BytesIO) -> Any:
    """The content of a file, on the CPU; from torch 2.6 on no code of the file runs."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, and advises to run the file's code
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 80, placeholder=" ...")
        raise CheckpointError(f"it does not hold plain data as a checkpoint does ({why})") from error


def make_folder(directory: pathlib.Path) -> None:
    """Make the folder of checkpoints, and bring its name to the disk."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    os.makedirs(directory, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)


def _sync(folder: pathlib.Path) -> None:
    """Bring the folder's own list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(directory: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """The complete checkpoints, (step, file) each, the newest first. CheckpointError if all are of torchmpi_py 0.1."""
    names = os.listdir(directory) if directory.exists() else []
    steps = sorted(
        ((int(match[1]), directory / name) for name in names if (match := _NAME.fullmatch(name))), reverse=True
    )
    if not steps and (former := next(filter(_FORMER_NAME.fullmatch, names), None)):
        raise CheckpointError(
            f"{directory / former} is a checkpoint of torchmpi_py 0.1, which this version cannot read: go on with 0.1, "
            "or use another folder"
        )
    return steps


def tidy(directory: pathlib.Path) -> None:
    """Remove what a job that was killed left of a file. For the holder of the folder's lock."""
    for path in directory.glob(".step-*.pt.partial-*"):
        with contextlib.suppress(OSError):  # another user's
            path.unlink()


def discard(path: pathlib.Path, aside: pathlib.Path | None = None) -> None:
    """Remove a checkpoint, or rename it. If that fails it stays, with a warning, and the next save tries again."""
    try:
        path.unlink() if aside is None else os.rename(path, aside)
    except FileNotFoundError:
        pass
    except OSError as error:
        warn_once("the checkpoint %s cannot be removed or renamed: %s", path, error.strerror)
