"""Files that are on the disk when they are written, with their size and checksum. No ranks, no names."""

from __future__ import annotations

import os
import pathlib
import zlib
from typing import Any

import torch


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


def read(path: pathlib.Path) -> Any:
    """What was written there, on the CPU. It is data and runs no code, whoever wrote the file."""
    return torch.load(path, map_location="cpu", weights_only=True)


def crc32(path: pathlib.Path) -> int:
    """The checksum of what the file holds now."""
    so_far = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            so_far = zlib.crc32(piece, so_far)
    return so_far


def sync(folder: pathlib.Path) -> None:
    """Bring the folder's own list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
