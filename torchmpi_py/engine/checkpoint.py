"""Checkpoints: what a job needs to go on after it was killed, in a folder, written by all ranks together.

Vocabulary. A checkpoint belongs to a *step*, and consists of *parts*: rank 0 writes what is equal on all ranks (the
model), and each rank what is its *own* (its random generators). It is *complete* when all parts are on the disk, and
only then gets its name; ``checkpoint_files`` says how.

How a save goes. Rank 0 makes a folder with a provisional name; each rank writes its files into it; the ranks tell each
other how that went; rank 0 gives the folder its name and removes the oldest. At each of these points an error on one
rank is told to all, and raised on all: a full disk on one host never leaves the others waiting.

How a load goes. Rank 0 lists what is complete, the newest first. Each rank checks the files that it reads; if one rank
finds one damaged, all of them take the next older checkpoint. Ranks that the saved job did not have read rank 0's part.
"""

from __future__ import annotations

import logging
import operator
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import torchmpi_py
from torchmpi_py.engine import checkpoint_files, outcomes, rng_state
from torchmpi_py.engine import checkpoint_files as files
from torchmpi_py.errors import CheckpointError

logger = logging.getLogger("torchmpi_py")

SEEN_WITHIN_SECONDS = 10.0
"""How long ranks look for what rank 0 has written: a file system over the network may show it later."""


Collected = tuple[Mapping[str, Any], Mapping[str, Any]]
"""What is equal on all ranks, and what is each rank's own."""


class Checkpoint(NamedTuple):
    """What ``Checkpoints.load`` gives."""

    step: int
    parts: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder, the last ``keep`` of them; for training loops of your own (the engine uses it too).

    ::

        checkpoints = Checkpoints("runs/7")
        saved = checkpoints.load()
        first = 0
        if saved is not None:
            model.load_state_dict(saved.parts["model"])
            optimizer.load_state_dict(saved.parts["optimizer"])
            first = saved.step
        for step in range(first, last):
            ...
            if (step + 1) % 100 == 0:
                checkpoints.save(step + 1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    Every rank of the current level makes the same calls. The folder has to be the same one on all hosts, and belongs to
    one job at a time. Works in a world of one, and without ``mpi.start()``, too.

    Raises CheckpointError, on every rank, when one of them cannot write or read, or does not see the folder.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise TypeError(f"keep={keep!r} must be an integer: how many checkpoints to keep")
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least 1 checkpoint")
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        self._is_seen = False  # by all ranks
        self._damaged: list[str] = []  # what load passed over

    def save(self, step: int, parts: Mapping[str, Any], *, own: Mapping[str, Any] | None = None) -> pathlib.Path:
        """Write a checkpoint, remove the oldest, and return its folder.

        parts: what is equal on all ranks (state_dicts, tensors, numbers, strings, lists and dicts of such); rank 0's is
        written. own: what is each rank's own, under other names. The states of the global random generators are saved
        without being asked for. A checkpoint of the same step is replaced.

        On all ranks TypeError for what cannot be read back as plain data, and ValueError for a negative step;
        CheckpointError for a step before the newest one in the folder, and if it cannot be written.
        """
        return self.save_collected(step, lambda: (parts, own or {}))

    def save_collected(self, step: int, collect: Callable[[], Collected]) -> pathlib.Path:
        """As ``save``; ``collect`` gives (parts, own), and an error in it on one rank is raised on all."""
        what = f"step {step} cannot be saved"
        taken: list[Collected] = []  # and not the result, which would go to all
        step = outcomes.of_all(lambda: _take(taken, step, collect), what, (TypeError, ValueError))[0]
        self._see()
        folder = outcomes.of_rank_0(lambda: self._begin(step), what)
        try:
            written = outcomes.of_all(lambda: _write(folder, *taken[0]), what)
            entries = {name: entry for each in written for name, entry in each.items()}
            return outcomes.of_rank_0(lambda: self._finish(folder, step, entries), what)
        except CheckpointError:
            if outcomes.rank() == 0:
                files.abandon(folder)
            raise

    def load(self) -> Checkpoint | None:
        """The last complete checkpoint, as (step, parts); a rank's own parts are among them. None if there is none.

        Tensors are on the CPU. The global random generators are set to what they were on this rank. A rank that the
        saved job did not have gets rank 0's own parts, and random numbers that follow from rank 0's and its number.
        """
        self._see()
        for name in outcomes.of_rank_0(lambda: files.complete(self.directory), "checkpoints cannot be listed"):
            folder = self.directory / name
            complaints = outcomes.of_all(partial(_complaint, folder), f"{name} cannot be read")
            if not any(complaints):
                found: list[dict[str, Any]] = []  # and not the result, which would go to all
                outcomes.of_all(partial(_read_into, found, folder), f"{name} cannot be read")
                return Checkpoint(files.step_of(name), found[0])
            self._damaged.append(name)
            if outcomes.rank() == 0:
                rank, why = next((rank, why) for rank, why in enumerate(complaints) if why)
                logger.warning("checkpoint %s is damaged and passed over (found by rank %d: %s)", folder, rank, why)
        return None

    def _begin(self, step: int) -> pathlib.Path:
        """Rank 0: make room for a checkpoint of this step."""
        for name in self._damaged:
            if (self.directory / name).exists():
                files.set_aside(self.directory / name)
        self._damaged.clear()
        files.tidy(self.directory)
        newest = max((files.step_of(name) for name in files.complete(self.directory)), default=-1)
        if newest > step:
            raise ValueError(
                f"{self.directory} holds a checkpoint of step {newest}, which is later than {step}: load() it first, "
                "remove it, or use another folder"
            )
        return files.begin(self.directory, step)

    def _finish(self, partial: pathlib.Path, step: int, entries: dict[str, Any]) -> pathlib.Path:
        """Rank 0: all parts are written; give the folder its name."""
        summary = {"size": outcomes.size(), "versions": _versions(), "files": entries}
        outcomes.soon(lambda: files.check(partial, summary, entries, ()), files.Lacking, SEEN_WITHIN_SECONDS)
        final = files.finish(partial, step, summary)
        for name in files.complete(self.directory)[self.keep :]:
            files.discard(self.directory / name)
        return final

    def _see(self) -> None:
        """Make the folder, and see that it is the same one for all ranks."""
        if self._is_seen:
            return
        token = outcomes.of_rank_0(self._leave_token, "the folder cannot be used")
        try:
            outcomes.of_all(lambda: self._find_token(token), "the folder is not the same for all ranks")
        finally:
            if outcomes.rank() == 0:
                os.unlink(self.directory / token)
        self._is_seen = True

    def _leave_token(self) -> str:
        files.make(self.directory)
        descriptor, path = tempfile.mkstemp(prefix=".token-", dir=self.directory)
        os.close(descriptor)
        return os.path.basename(path)

    def _find_token(self, token: str) -> None:
        def look() -> None:
            # The list of names, and not the file: what was once not there may be remembered as such for a while.
            if not self.directory.is_dir() or token not in os.listdir(self.directory):
                raise FileNotFoundError(
                    f"{self.directory} lacks what rank 0 has written to it: "
                    "give a folder on a file system that all hosts share"
                )

        outcomes.soon(look, FileNotFoundError, SEEN_WITHIN_SECONDS)


def check_collected(parts: Mapping[str, Any], own: Mapping[str, Any]) -> Collected:
    """(parts, own) as they are written. TypeError or ValueError for what ``Checkpoints.save`` does not take."""
    if both := sorted(parts.keys() & own.keys()):
        raise ValueError(f"{both} are both in parts and in own: give them different names")
    return checkpoint_files.plain(dict(parts), "parts"), checkpoint_files.plain(dict(own), "own")


def _take(taken: list[Collected], step: int, collect: Callable[[], Collected]) -> int:
    taken.append(check_collected(*collect()))
    if (step := operator.index(step)) < 0:
        raise ValueError(f"step={step} must not be negative")
    return step


def _write(partial: pathlib.Path, parts: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Each rank: write its files. Returns their sizes and checksums."""
    name = files.part_of(outcomes.rank())
    entries = {name: checkpoint_files.write(partial / name, {"own": dict(own), "random": rng_state.captured()})}
    if outcomes.rank() == 0:
        entries[files.MODEL] = checkpoint_files.write(partial / files.MODEL, dict(parts))
    return entries


def _complaint(folder: pathlib.Path) -> str:
    """Each rank: what is wrong with the files that it reads, and on rank 0 with the sizes of all; empty if nothing."""
    try:
        outcomes.soon(lambda: _check(folder), files.Lacking, SEEN_WITHIN_SECONDS)
    except files.Damaged as damage:
        return str(damage)
    return ""


def _check(folder: pathlib.Path) -> None:
    summary = files.summary_of(folder)
    mine = [_own_file(summary), files.MODEL]
    if outcomes.rank() == 0:
        files.check(folder, summary, summary["files"], mine)
    else:
        files.check(folder, summary, mine, mine[:1])


def _read_into(found: list[dict[str, Any]], folder: pathlib.Path) -> None:
    """Each rank: read what is there for it."""
    summary = files.summary_of(folder)
    parts = checkpoint_files.read(folder / files.MODEL)
    mine = checkpoint_files.read(folder / _own_file(summary))
    if outcomes.rank() < summary["size"]:
        rng_state.restore(mine["random"])
    else:
        rng_state.derive(mine["random"], outcomes.rank())
    found.append({**parts, **mine["own"]})


def _own_file(summary: dict[str, Any]) -> str:
    return files.part_of(outcomes.rank() if outcomes.rank() < summary["size"] else 0)


def _versions() -> dict[str, str]:
    return {
        "torchmpi_py": torchmpi_py.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
