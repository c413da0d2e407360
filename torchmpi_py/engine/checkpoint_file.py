"""The files of checkpoints: how one is written so that a kill at any point leaves the last complete one. No ranks.

::

    DIR/step-000120.pt                  complete: it got this name when everything in it was on the disk
    DIR/.step-000130.pt.partial-1f0c    being written, or left by a job that was killed then
    DIR/step-000120.pt.damaged          could not be read, and was passed over
    DIR/.lock                           locked by the job that saves here (``folder_lock``)

A name changes by ``rename``, which is atomic; before it the file is brought to the disk by ``fsync``, and after it the
folder is. So the name ``step-N.pt`` is never seen on half a checkpoint, not even after a power failure. ``tidy``
removes what a killed job left.

A file is what ``torch.save`` writes, then 24 bytes: a mark, the format, and the CRC-32 and size of what precedes.
``torch.load`` reads it as it is. It holds plain data, so ``torch.load(weights_only=True)`` reads it back and runs no
code of the file from torch 2.6 on; with an earlier torch, load only files whose author you trust.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import pathlib
import re
import struct
import textwrap
import uuid
import zlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

from torchmpi_py import trusted_files
from torchmpi_py.engine.folder_lock import warn_once
from torchmpi_py.errors import CheckpointError

FORMAT = 2  # 1: a folder for each step, until torchmpi_py 0.1
TRAILER = struct.Struct("<8sIIQ")
_MARK = b"torchmpi"
_MAY_PASS = {errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOMEM, errno.EPERM, errno.ESTALE}
"""Errors of reading that do not mean damage: the file may be read at another time, or by another user."""
_NAME = re.compile(r"step-(\d+)\.pt")
_FORMER_NAME = re.compile(r"step-\d+")

_LEAVES = (
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
    *(bool, int, float, complex, str, bytes, type(None)),
)
_INT_BITS = 2039  # torch.load(weights_only=True) reads no longer ones


class Damaged(Exception):  # noqa: N818 - the name says the state
    """A checkpoint is not as it was written."""


def plain(content: Any, where: str) -> Any:
    """The content, with numpy's numbers as Python's, and tensors without the attributes that a program has given them.

    TypeError that says where something is that is not plain data.
    """
    kind = type(content)
    if kind in (dict, OrderedDict, Counter):
        copied = copy.copy(content)  # with its attributes: a state_dict's versions
        copied.clear()
        for key, value in content.items():
            copied[plain(key, f"the key {key!r} of {where}")] = plain(value, f"{where}[{key!r}]")
        return copied
    if kind in (list, tuple, set):
        return kind(plain(value, f"{where}[{index}]") for index, value in enumerate(content))
    if isinstance(content, (np.number, np.bool_)) and type(content.item()) in _LEAVES:
        return content.item()
    if kind in (torch.Tensor, torch.nn.Parameter):
        is_part = content.layout is torch.strided and content.untyped_storage().nbytes() > content.nbytes
        # torch.save would write all of the memory that a view lies in.
        return content.detach().clone() if is_part else content.detach() if vars(content) else content
    is_long = kind is int and content.bit_length() > _INT_BITS
    if kind in _LEAVES and not is_long:
        return content
    name = f"int of more than {_INT_BITS} bits" if is_long else f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(
        f"{where} is a {name}, which a checkpoint does not hold: it holds tensors, numbers, strings, and lists, "
        "tuples, sets and dicts of them (numpy: torch.from_numpy(x))"
    )


def packed(content: Any) -> memoryview:
    """Plain data as the bytes of a file without a trailer."""
    torch.save(content, stream := io.BytesIO())
    return stream.getbuffer()


def write(path: pathlib.Path, content: Any) -> None:
    """Write plain data under a provisional name, and give it its name when it is on the disk. OSError if that fails."""
    data, partial = packed(content), path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.write(TRAILER.pack(_MARK, FORMAT, zlib.crc32(data), len(data)))
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
            file.seek(-min(TRAILER.size, os.stat(path).st_size), os.SEEK_END)
            trailer = file.read()
            if len(trailer) < TRAILER.size or not trailer.startswith(_MARK):
                raise Damaged("its last bytes are missing: it was cut off, or torchmpi_py has not written it")
            file.seek(0)
            stream = io.BytesIO(file.read())
    except OSError as error:
        if error.errno in _MAY_PASS:
            raise
        raise Damaged(error.strerror) from error
    content, (_, written, crc32, num_bytes) = stream.getbuffer(), TRAILER.unpack(trailer)
    if written > FORMAT:
        raise CheckpointError(
            f"{path} has format {written}, and this torchmpi_py reads up to {FORMAT}: use the version that wrote it"
        )
    if (num_bytes, crc32) != (len(content) - TRAILER.size, zlib.crc32(content[: -TRAILER.size])):
        raise Damaged("it does not hold what was written: its size or its checksum is another")
    return stream


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
