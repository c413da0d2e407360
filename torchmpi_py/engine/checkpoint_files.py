"""The files of checkpoints: how they are written so that a kill at any point leaves the last complete one. No ranks.

::

    DIR/step-000120/                    complete: it got this name when everything in it was on the disk
        checkpoint.json                 format, step, number of ranks, versions; size and CRC-32 of the others; its own
        model.pt                        what is equal on all ranks, written by rank 0
        rank-0.pt  rank-1.pt  ...       what is each rank's own
    DIR/.step-000130.partial-1f0c/      being written, or left by a job that was killed then
    DIR/.step-000090.removed-84ab/      being removed
    DIR/step-000120.replaced/           an older one of the same step, while the newer one takes its name
    DIR/step-000120.damaged/            could not be read, and was passed over
    DIR/.probe-77c0/                    for a moment: whether all ranks see the same folder
    DIR/.lock                           locked by the job that saves here (``folder_lock``)

A name changes by ``rename``, which is atomic; before it, files and folder are brought to the disk by ``fsync``, and
after it the folder that holds them is. So the name ``step-N`` is never seen on half a checkpoint, not even after a
power failure. ``tidy`` removes what a killed job left.

The files hold plain data, which ``torch.load(weights_only=True)`` reads back. It runs no code of a file from torch 2.6
on, and is hardened further in 2.10: with an earlier torch, load only files whose author you trust.

Anybody's checkpoints are loaded, but ``tidy`` leaves what belongs to another user.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pathlib
import re
import shutil
import textwrap
import time
import uuid
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np
import torch

from torchmpi_py import trusted_files
from torchmpi_py.engine.folder_lock import warn_once
from torchmpi_py.errors import CheckpointError

FORMAT = 1
"""The format of a checkpoint's folder; a reader refuses a higher one."""

SUMMARY, MODEL = "checkpoint.json", "model.pt"
PROBE_SECONDS = 60.0  # an older probe was left by a job that was killed
_MOST_SUMMARY_BYTES = 1 << 28  # 200 bytes a rank
_NAME = re.compile(r"step-(\d+)(\.replaced)?")

_DICTS = (dict, OrderedDict, Counter)
_LISTS = (list, tuple, set)
_LEAVES = (
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
    *(bool, int, float, complex, str, bytes, type(None)),
)
_NUMBERS: dict[type, Callable[[Any], Any]] = {
    np.floating: float,
    np.complexfloating: complex,
    np.integer: int,
    np.bool_: bool,
}
_TOO_PRECISE = (np.longdouble, np.clongdouble)  # for Python's numbers
_INT_BYTES = 255  # torch.load(weights_only=True) reads no longer ones


class Damaged(Exception):  # noqa: N818 - the name says the state
    """A checkpoint lacks a file, or holds one that is not as it was written."""


class Lacking(Damaged):
    """A checkpoint lacks something, which a file system over the network may show later."""


def plain(content: Any, where: str) -> Any:
    """The content, with numpy's numbers as Python's, and tensors without the attributes that a program has given them.

    TypeError that says where something is that is no plain data.
    """
    return _plain(content, where, {})


def _plain(content: Any, where: str, bare: dict[int, torch.Tensor]) -> Any:
    """Like ``plain``; ``bare``: the tensors without attributes, by the id of what they stand for."""
    kind = type(content)
    if kind in _DICTS:
        copied = copy.copy(content)  # with its attributes: a state_dict's versions
        copied.clear()
        for key, value in content.items():
            copied[_plain(key, f"the key {key!r} of {where}", bare)] = _plain(value, f"{where}[{key!r}]", bare)
        return copied
    if kind in _LISTS:
        return kind(_plain(value, f"{where}[{index}]", bare) for index, value in enumerate(content))
    if kind not in _TOO_PRECISE:
        for numbers, python in _NUMBERS.items():
            if isinstance(content, numbers):
                return python(content)
    if isinstance(content, torch.Tensor) and kind in _LEAVES and vars(content):
        return bare.setdefault(id(content), _without_attributes(content))
    is_long = kind is int and not _fits(content)
    if kind in _LEAVES and not is_long:
        return content
    name = f"int of more than {_INT_BYTES} bytes" if is_long else f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(
        f"{where} is a {name}, which a checkpoint does not hold: it holds tensors, numbers, strings, and lists, "
        "tuples, sets and dicts of them (numpy: torch.from_numpy(x))"
    )


def _without_attributes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or Parameter, in the same memory, without what is in its ``__dict__``."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _fits(number: int) -> bool:
    """Whether an int has at most ``_INT_BYTES`` bytes."""
    try:
        number.to_bytes(_INT_BYTES, "little", signed=True)
    except OverflowError:
        return False
    return True


def write(path: pathlib.Path, content: Any) -> dict[str, int]:
    """Write plain data, and bring it to the disk. Return its size and checksum. OSError if that fails."""
    try:
        with open(path, "wb") as file:
            stream = ChecksumStream(file)
            torch.save(content, stream)  # type: ignore[arg-type]  # it asks for write and flush
            stream.end()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of write does not know the path
        raise
    return {"bytes": stream.num_bytes, "crc32": stream.crc32}


class ChecksumStream:
    """A stream for ``torch.save`` that counts bytes, computes their CRC-32, and holds back an error until ``end``.

    torch would replace an error inside ``write`` by one of its own, which says nothing of a full disk.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.num_bytes = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        self.crc32 = zlib.crc32(data, self.crc32)
        self.num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Nothing: ``end`` flushes."""

    def end(self) -> None:
        """Hand everything to the system, or raise the error of a write."""
        if self.error is not None:
            raise self.error
        self.file.flush()


def read(path: pathlib.Path) -> Any:
    """Return the content of a file, on the CPU; from torch 2.6 on no code of the file runs."""
    with open(trusted_files.open_file(path, os.O_RDONLY, owners=None), "rb") as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except OSError:  # the file could not be read
            raise
        except Exception as error:  # torch raises many kinds, and advises to run the file's code
            why = textwrap.shorten(f"{type(error).__name__}: {error}", 80, placeholder=" ...")
            raise CheckpointError(f"{path} does not hold plain data as a checkpoint does ({why})") from error


def sync(folder: pathlib.Path) -> None:
    """Bring the folder's own list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def part_of(rank: int) -> str:
    """The name of the file with this rank's own parts."""
    return f"rank-{rank}.pt"


def complete(directory: pathlib.Path) -> list[str]:
    """The names of complete checkpoints, the newest first; of the same step the newer first."""
    found = [match for entry in os.listdir(directory) if (match := _NAME.fullmatch(entry))]
    return [match[0] for match in sorted(found, key=lambda match: (-int(match[1]), match[2] or ""))]


def step_of(name: str) -> int:
    """The step in the name of a complete checkpoint."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def begin(directory: pathlib.Path, step: int) -> pathlib.Path:
    """A new folder with the provisional name of a checkpoint, in the folder of checkpoints."""
    return _make_inside(directory, f".step-{step:06}.partial-{uuid.uuid4().hex[:8]}")


def begin_probe(directory: pathlib.Path) -> pathlib.Path:
    """A new folder by which other ranks see that their folder of checkpoints is the same."""
    return _make_inside(directory, f".probe-{uuid.uuid4().hex[:8]}")


def _make_inside(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Make a folder in the folder of checkpoints, which is made if it is missing."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    os.makedirs(directory, exist_ok=True)
    for folder in made:
        sync(folder.parent)  # the new names are on the disk
    folder = directory / name
    os.mkdir(folder)
    return folder


def finish(partial: pathlib.Path, step: int, summary: dict[str, Any]) -> pathlib.Path:
    """Give a folder that holds all parts its name; it is complete then."""
    content = {"format": FORMAT, "step": step, **summary}
    with open(partial / SUMMARY, "w", encoding="utf-8") as file:
        json.dump({**content, "crc32": _crc32_of_summary(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(partial)
    final = partial.parent / f"step-{step:06}"
    # A checkpoint of the same step keeps a complete one's name until the new one has its own.
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    sync(final.parent)
    if replaced.exists():
        discard(replaced)
    return final


def tidy(directory: pathlib.Path) -> None:
    """Remove what a job of this user left that was killed while it wrote, or while it removed.

    For the holder of the folder's lock: no other job saves, but another one may look for its probe to load.
    """
    for name in os.listdir(directory):
        path = directory / name
        if not trusted_files.is_own(path):
            if name.startswith(".step-"):
                owner = trusted_files.owner_name(os.lstat(path).st_uid)
                warn_once("%s was left by a job of another user: ask %s to remove it", path, owner)
        elif name.startswith(".step-"):
            remove(path)
        elif name.startswith(".probe-"):
            with contextlib.suppress(FileNotFoundError):  # the job that has made it removes it
                if time.time() - path.lstat().st_mtime > PROBE_SECONDS:
                    remove(path)
        elif name.endswith(".replaced") and _NAME.fullmatch(name):
            newer = path.with_suffix("")
            if newer.exists():
                discard(path)
            else:
                os.rename(path, newer)


def discard(folder: pathlib.Path) -> None:
    """Remove a checkpoint: at once by its name, so that half of one never has the name of a whole.

    If that fails it stays, with a warning: nothing is lost, and the next save tries again.
    """
    away = folder.with_name(f".{folder.name}.removed-{uuid.uuid4().hex[:8]}")
    if not os.access(folder, os.W_OK):
        owner = trusted_files.owner_name(os.lstat(folder).st_uid)
        warn_once("the old checkpoint %s cannot be removed: it belongs to %s", folder, owner)
    elif _renamed(folder, away):
        remove(away)


def _renamed(folder: pathlib.Path, to: pathlib.Path) -> bool:
    try:
        os.rename(folder, to)
    except OSError as error:
        warn_once("the checkpoint %s cannot be removed, or be renamed: %s", folder, error.strerror)
        return False
    return True


def remove(folder: pathlib.Path) -> None:
    """Remove a folder that has no name of a complete checkpoint, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: pathlib.Path) -> None:
    """Rename a damaged checkpoint, so that it is not looked at again."""
    aside = folder.with_name(f"{folder.name}.damaged")
    if aside.exists():
        discard(aside)
    _renamed(folder, aside)


def summary_of(folder: pathlib.Path) -> dict[str, Any]:
    """The content of ``checkpoint.json``. Damaged if it cannot be read, CheckpointError if a later version wrote it."""
    try:
        summary = trusted_files.read_json(folder / SUMMARY, _MOST_SUMMARY_BYTES, owners=None)
        is_whole = summary.pop("crc32") == _crc32_of_summary(summary)
        written = int(summary["format"])
    except PermissionError:
        raise  # that is no damage
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Lacking(f"{SUMMARY} cannot be read: {type(error).__name__}: {error}") from error
    if not is_whole:
        raise Damaged(f"{SUMMARY} does not hold what was written: its checksum is another")
    if written > FORMAT:
        raise CheckpointError(
            f"{folder} has format {written}, and this torchmpi_py reads up to {FORMAT}: it was written by "
            f"torchmpi_py {summary.get('versions', {}).get('torchmpi_py')}; use that, or a later one"
        )
    if summary["step"] != step_of(folder.name):
        raise Damaged(f"{SUMMARY} is of step {summary['step']}")
    if not summary["files"].keys() >= {MODEL, *map(part_of, range(summary["size"]))}:
        raise Damaged(f"{SUMMARY} does not name the files of {summary['size']} ranks")
    return dict(summary)


def check(folder: pathlib.Path, summary: dict[str, Any], names: Iterable[str], whole: Container[str]) -> None:
    """Damaged unless these files have the sizes they were written with, and those in ``whole`` their checksums."""
    for name in names:
        written = summary["files"][name]
        try:
            num_bytes = os.stat(folder / name).st_size
            if num_bytes != written["bytes"]:
                kind = Lacking if num_bytes < written["bytes"] else Damaged
                raise kind(f"{name} has {num_bytes} bytes of {written['bytes']}")
            if name in whole and _crc32_of_file(folder / name) != written["crc32"]:
                raise Damaged(f"{name} does not hold what was written: its checksum is another")
        except FileNotFoundError:
            raise Lacking(f"{name} is missing") from None
        except PermissionError:
            raise
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from error


def _crc32_of_file(path: pathlib.Path) -> int:
    so_far = 0
    with open(trusted_files.open_file(path, os.O_RDONLY, owners=None), "rb") as file:
        while piece := file.read(1 << 20):
            so_far = zlib.crc32(piece, so_far)
    return so_far


def _crc32_of_summary(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
