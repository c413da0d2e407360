"""The files of checkpoints: how they are written so that a kill at any point leaves the last complete one. No ranks.

::

    DIR/step-000120/                    complete: it got this name when everything in it was on the disk
        checkpoint.json                 format, step, number of ranks, versions; size and CRC-32 of the other files
        model.pt                        what is equal on all ranks, written by rank 0
        rank-0.pt  rank-1.pt  ...       what is each rank's own
    DIR/.step-000130.partial-1f0c/      being written, or left by a job that was killed then
    DIR/.step-000090.removed/           being removed
    DIR/step-000120.replaced/           an older one of the same step, while the newer one takes its name
    DIR/step-000120.damaged/            could not be read, and was passed over

A name changes by ``rename``, which is atomic; before it, files and folder are brought to the disk by ``fsync``, and
after it the folder that holds them is. So the name ``step-N`` is never seen on half a checkpoint, not even after a
power failure. What a killed job left is removed by ``tidy``.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import uuid
import zlib
from typing import Any

import torch

from torchmpi_py.errors import CheckpointError

FORMAT = 1
"""Of what lies in a checkpoint's folder; a reader refuses a higher one."""

SUMMARY, MODEL = "checkpoint.json", "model.pt"
_NAME = re.compile(r"step-(\d+)(\.replaced)?")


class Damaged(Exception):  # noqa: N818 - the name says the state
    """A checkpoint lacks a file, or holds one that is not as it was written."""


def part_of(rank: int) -> str:
    """The file of what is this rank's own."""
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
    """A new folder to write into."""
    partial = directory / f".step-{step:06}.partial-{uuid.uuid4().hex[:8]}"
    os.mkdir(partial)
    return partial


def write(path: pathlib.Path, content: Any) -> dict[str, int]:
    """Write what torch can save, and bring it to the disk. Return its size and checksum. OSError if that fails."""
    try:
        with open(path, "wb") as file:
            stream = _Stream(file)
            torch.save(content, stream)  # type: ignore[arg-type]  # it asks for write and flush
            stream.end()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # not known to what writes
        raise
    return {"bytes": stream.num_bytes, "crc32": stream.crc32}


def abandon(partial: pathlib.Path) -> None:
    """Remove what cannot be finished."""
    shutil.rmtree(partial, ignore_errors=True)


def finish(partial: pathlib.Path, step: int, summary: dict[str, Any]) -> pathlib.Path:
    """Give a folder that holds all parts its name; it is complete then."""
    with open(partial / SUMMARY, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **summary}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _to_disk(partial)
    final = partial.parent / f"step-{step:06}"
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    _to_disk(final.parent)
    if replaced.exists():
        discard(replaced)
    return final


def tidy(directory: pathlib.Path) -> None:
    """Remove what a job left that was killed while it wrote, or while it removed."""
    for entry in os.scandir(directory):
        if entry.name.startswith(".step-"):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name.startswith(".token-"):
            os.unlink(entry.path)
        elif entry.name.endswith(".replaced") and _NAME.fullmatch(entry.name):
            newer = directory / entry.name.removesuffix(".replaced")
            if newer.exists():
                discard(pathlib.Path(entry.path))
            else:
                os.rename(entry.path, newer)


def discard(folder: pathlib.Path) -> None:
    """Remove a checkpoint: at once by its name, so that half of one is never taken for a whole."""
    away = folder.with_name(f".{folder.name}.removed")
    os.rename(folder, away)
    shutil.rmtree(away, ignore_errors=True)


def set_aside(folder: pathlib.Path) -> None:
    """Rename a damaged checkpoint, so that it is not looked at again."""
    aside = folder.with_name(f"{folder.name}.damaged")
    if aside.exists():
        discard(aside)
    os.rename(folder, aside)


def summary_of(folder: pathlib.Path) -> dict[str, Any]:
    """What ``checkpoint.json`` says. Damaged if it cannot be read, CheckpointError if a later version wrote it."""
    try:
        summary = json.loads((folder / SUMMARY).read_bytes())
        written = int(summary["format"])
    except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{SUMMARY} cannot be read: {type(error).__name__}: {error}") from error
    if written > FORMAT:
        raise CheckpointError(
            f"{folder} has format {written}, and this torchmpi_py reads up to {FORMAT}: it was written by "
            f"torchmpi_py {summary.get('versions', {}).get('torchmpi_py')}; use that, or a later one"
        )
    return dict(summary)


def check(folder: pathlib.Path, summary: dict[str, Any], whole: list[str]) -> None:
    """Damaged unless all files have the sizes they were written with, and those in ``whole`` their checksums."""
    for name, written in summary["files"].items():
        try:
            num_bytes = os.stat(folder / name).st_size
            if num_bytes != written["bytes"]:
                raise Damaged(f"{name} has {num_bytes} bytes of {written['bytes']}")
            if name in whole and _crc32(folder / name) != written["crc32"]:
                raise Damaged(f"{name} does not hold what was written: its checksum is another")
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None


def read(path: pathlib.Path) -> Any:
    """What was written there, on the CPU. It is data and runs no code, whoever wrote the file."""
    return torch.load(path, map_location="cpu", weights_only=True)


class _Stream:
    """Where ``torch.save`` writes: it counts, sums up, and holds back an error until the end.

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
        """Torch calls it; ``end`` does it."""

    def end(self) -> None:
        """Hand everything to the system, or raise what went wrong."""
        if self.error is not None:
            raise self.error
        self.file.flush()


def _crc32(path: pathlib.Path) -> int:
    crc32 = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            crc32 = zlib.crc32(piece, crc32)
    return crc32


def _to_disk(folder: pathlib.Path) -> None:
    """The folder's own list of names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
