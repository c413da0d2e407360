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

A name changes by ``rename``, which is atomic; before it, files and folder are brought to the disk by ``fsync``, and
after it the folder that holds them is. So the name ``step-N`` is never seen on half a checkpoint, not even after a
power failure. What a killed job left is removed by ``tidy``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import uuid
import zlib
from collections.abc import Container, Iterable
from typing import Any

from torchmpi_py.engine import disk
from torchmpi_py.errors import CheckpointError

logger = logging.getLogger("torchmpi_py")

FORMAT = 1
"""Of what lies in a checkpoint's folder; a reader refuses a higher one."""

SUMMARY, MODEL = "checkpoint.json", "model.pt"
_NAME = re.compile(r"step-(\d+)(\.replaced)?")


class Damaged(Exception):  # noqa: N818 - the name says the state
    """A checkpoint lacks a file, or holds one that is not as it was written."""


class Lacking(Damaged):
    """It lacks something, which a file system over the network may show later."""


def part_of(rank: int) -> str:
    """The file of what is this rank's own."""
    return f"rank-{rank}.pt"


def make(directory: pathlib.Path) -> None:
    """Make the folder where checkpoints are kept, if it is not there, and those that it is in; also on the disk."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    os.makedirs(directory, exist_ok=True)
    for folder in made:
        disk.sync(folder.parent)


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


def abandon(partial: pathlib.Path) -> None:
    """Remove what cannot be finished."""
    shutil.rmtree(partial, ignore_errors=True)


def finish(partial: pathlib.Path, step: int, summary: dict[str, Any]) -> pathlib.Path:
    """Give a folder that holds all parts its name; it is complete then."""
    content = {"format": FORMAT, "step": step, **summary}
    with open(partial / SUMMARY, "w", encoding="utf-8") as file:
        json.dump({**content, "crc32": _crc32_of_summary(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    disk.sync(partial)
    final = partial.parent / f"step-{step:06}"
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    disk.sync(final.parent)
    if replaced.exists():
        discard(replaced)
    return final


def tidy(directory: pathlib.Path) -> None:
    """Remove what a job left that was killed while it wrote, or while it removed."""
    for entry in os.scandir(directory):
        if entry.name.startswith(".step-"):
            _remove(pathlib.Path(entry.path))
        elif entry.name.startswith(".token-"):
            os.unlink(entry.path)
        elif entry.name.endswith(".replaced") and _NAME.fullmatch(entry.name):
            newer = directory / entry.name.removesuffix(".replaced")
            if newer.exists():
                discard(pathlib.Path(entry.path))
            else:
                os.rename(entry.path, newer)


def discard(folder: pathlib.Path) -> None:
    """Remove a checkpoint: at once by its name, so that half of one is never taken for a whole.

    If that fails it stays, with a warning: nothing is lost, and the next save tries again.
    """
    away = folder.with_name(f".{folder.name}.removed-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(folder, away)
    except OSError as error:
        logger.warning("the old checkpoint %s cannot be removed: %s", folder, error.strerror)
    else:
        _remove(away)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


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
            if name in whole and disk.crc32(folder / name) != written["crc32"]:
                raise Damaged(f"{name} does not hold what was written: its checksum is another")
        except FileNotFoundError:
            raise Lacking(f"{name} is missing") from None
        except PermissionError:
            raise
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from error


def _crc32_of_summary(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
