"""Checkpoints: what a job needs to go on after it was killed, in a folder, written by all ranks.

Vocabulary. A checkpoint belongs to a *step*, and consists of *parts*: rank 0 writes what is equal on all ranks (the
model), and each rank what is its *own* (its random generators). It is *complete* when all parts are on the disk, and
only then gets its name; ``checkpoint_files`` says how.

A save. Rank 0 makes a folder with a provisional name; each rank writes its files into it; the ranks exchange whether
all have succeeded; rank 0 gives the folder its name and removes the oldest. An error of one rank at any of these points
is raised on all ranks (``outcomes``): a full disk on one host never leaves the others waiting.

Rank 0 takes a lock on the folder before the first save (``folder_lock``), so that two jobs never save into one folder.
A load needs no lock.

A load. Rank 0 lists what is complete, the newest first. Each rank checks the files that it reads; if one rank finds a
damaged one, all of them take the next older checkpoint. Ranks that the saved job did not have read rank 0's part.
"""

from __future__ import annotations

import logging
import operator
import os
import pathlib
import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

import torchmpi_py
from torchmpi_py.engine import checkpoint_files as files, folder_lock, outcomes, samples
from torchmpi_py.errors import CheckpointError

logger = logging.getLogger("torchmpi_py")

SEEN_WITHIN_SECONDS = 10.0
"""How long ranks look for what another rank has written: a file system over the network may show it later."""

Collected = tuple[Mapping[str, Any], Mapping[str, Any]]
"""What is equal on all ranks, and what is each rank's own."""

T = TypeVar("T")


class Saved(NamedTuple):
    """The result of ``Checkpoints.load``."""

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

    Every rank of the current level makes the same calls. The folder has to be the same one on all hosts. One job at a
    time saves into it; other jobs may load. Works in a world of one, and without ``mpi.start()``, too.

    Raises CheckpointError, on every rank, when one of them cannot write or read, or does not see the folder, and when
    another job saves into the folder.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise TypeError(f"keep={keep!r} must be an integer: how many checkpoints to keep")
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least 1 checkpoint")
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        self._is_shared = False  # all ranks have seen it
        self._damaged: list[str] = []  # what load passed over
        self._lock: folder_lock.FolderLock | None = None  # rank 0's, as long as this object lives

    def hold(self) -> None:
        """Keep other jobs from saving into the folder, as the first `save` does. Collective.

        The folder is free again after `release`, and when the process of rank 0 has ended. CheckpointError, on all
        ranks, that names the other job if one saves into the folder.
        """
        self._check_shared()
        outcomes.of_rank_0(self._hold, "the folder cannot be used")

    def release(self) -> None:
        """Let other jobs save into the folder. Not collective; a later `save` takes the folder again."""
        self._lock = None

    def save(self, step: int, parts: Mapping[str, Any], *, own: Mapping[str, Any] | None = None) -> pathlib.Path:
        """Write a checkpoint, remove the oldest, and return its folder. Collective.

        parts: what is equal on all ranks (state_dicts, tensors, numbers, strings, lists and dicts of such); rank 0's is
        written. own: what is each rank's own, under other names. The states of the global random generators are saved
        too. A checkpoint of the same step is replaced.

        On all ranks TypeError for what cannot be read back as plain data, and ValueError for a negative step;
        CheckpointError for a step before the newest one in the folder, and if it cannot be written.
        """
        return self.save_collected(step, lambda: (parts, own or {}))

    def save_collected(self, step: int, collect: Callable[[], Collected]) -> pathlib.Path:
        """Like ``save``; ``collect`` gives (parts, own), and an error in it on one rank is raised on all."""
        what = f"step {step} cannot be saved"
        # What cannot be saved is found before a file is written.
        parts, own = _result_here(lambda: _checked(step, collect), what, (TypeError, ValueError))
        step = operator.index(step)
        self._check_shared()
        folder = outcomes.of_rank_0(lambda: self._begin(step), what)
        try:
            # All ranks have brought their files to the disk before rank 0 gives the folder its name.
            written = outcomes.of_all(lambda: _write(folder, parts, own), what)
            return outcomes.of_rank_0(lambda: self._finish(folder, step, written), what)
        except CheckpointError:
            if outcomes.rank() == 0:
                files.remove(folder)
            raise

    def load(self) -> Saved | None:
        """The last complete checkpoint, as (step, parts); a rank's own parts are among them. None if there is none.

        Collective. Tensors are on the CPU. The global random generators are set to what they were on this rank. A rank
        that the saved job did not have gets rank 0's own parts, and random numbers that follow from rank 0's and its
        number.
        """
        self._check_shared()
        for name in outcomes.of_rank_0(lambda: files.complete(self.directory), "checkpoints cannot be listed"):
            folder, failure = self.directory / name, f"{name} cannot be read"
            # All ranks know of the damage that one has found, and take the same checkpoint.
            damages = outcomes.of_all(partial(_damage, folder), failure)
            if not any(damages):
                return Saved(files.step_of(name), _result_here(partial(_read, folder), failure))
            if not outcomes.of_rank_0(folder.exists, failure):
                return self.load()  # another job that saves has removed it, and has a later one
            self._damaged.append(name)
            if outcomes.rank() == 0:
                rank, why = next((rank, why) for rank, why in enumerate(damages) if why)
                logger.warning("checkpoint %s is damaged and passed over (found by rank %d: %s)", folder, rank, why)
        return None

    def _hold(self) -> None:
        """Rank 0: take the lock. A job that was killed, or its former rank 0, may still be about to end."""
        take = partial(folder_lock.take, self.directory)
        self._lock = outcomes.soon(take, BlockingIOError, SEEN_WITHIN_SECONDS)

    def _begin(self, step: int) -> pathlib.Path:
        """Rank 0: make room for a checkpoint of this step, and a folder to write it into."""
        self._hold()
        # A damaged checkpoint of a later step must not keep a run from saving this one.
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

    def _finish(self, folder: pathlib.Path, step: int, written: list[dict[str, Any]]) -> pathlib.Path:
        """Rank 0: all parts are on the disk; give the folder its name, and remove the oldest."""
        entries = {name: entry for of_rank in written for name, entry in of_rank.items()}
        summary = {"size": len(written), "versions": _versions(), "files": entries}
        # Parts of other hosts may be seen late, or cut off. Older checkpoints go only for one that is whole here.
        outcomes.soon(lambda: files.check(folder, summary, entries, ()), files.Lacking, SEEN_WITHIN_SECONDS)
        final = files.finish(folder, step, summary)
        for name in files.complete(self.directory)[self.keep :]:
            files.discard(self.directory / name)
        return final

    def _check_shared(self) -> None:
        """Make the folder; CheckpointError on all ranks unless it is the same one for all of them."""
        if self._is_shared:
            return
        probe = outcomes.of_rank_0(lambda: files.begin_probe(self.directory), "the folder cannot be used")
        try:
            find = partial(self._find, probe.name)
            different = "the folder is not the same for all ranks"
            outcomes.of_all(lambda: outcomes.soon(find, FileNotFoundError, SEEN_WITHIN_SECONDS), different)
        finally:
            if outcomes.rank() == 0:
                files.remove(probe)
        self._is_shared = True

    def _find(self, name: str) -> None:
        # The list of names, and not the entry: a file system may remember for a while that a name was not there.
        if not self.directory.is_dir() or name not in os.listdir(self.directory):
            raise FileNotFoundError(
                f"{self.directory} lacks what rank 0 has written to it: "
                "give a folder on a file system that all hosts share"
            )


def check_collected(parts: Mapping[str, Any], own: Mapping[str, Any]) -> Collected:
    """(parts, own) as they are written. TypeError or ValueError for what ``Checkpoints.save`` does not take."""
    if both := sorted(parts.keys() & own.keys()):
        raise ValueError(f"{both} are both in parts and in own: give them different names")
    return files.plain(dict(parts), "parts"), files.plain(dict(own), "own")


def _checked(step: int, collect: Callable[[], Collected]) -> Collected:
    collected = check_collected(*collect())
    if operator.index(step) < 0:
        raise ValueError(f"step={step} must not be negative")
    return collected


def _result_here(work: Callable[[], T], what: str, mistakes: tuple[type[Exception], ...] = ()) -> T:
    """Like ``outcomes.of_all``, for large results: they are not exchanged, and each rank has its own."""
    results: list[T] = []
    outcomes.of_all(lambda: results.append(work()), what, mistakes)
    return results[0]


def _write(folder: pathlib.Path, parts: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Each rank: write its files. Returns their sizes and checksums."""
    name = files.part_of(outcomes.rank())
    entries = {name: files.write(folder / name, {"own": dict(own), "random": samples.random_states()})}
    if outcomes.rank() == 0:
        entries[files.MODEL] = files.write(folder / files.MODEL, dict(parts))
    return entries


def _damage(folder: pathlib.Path) -> str:
    """Each rank: the damage in the files that it reads, and on rank 0 in the sizes of all files; "" for none."""
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
        files.check(folder, summary, mine, mine[:1])  # rank 0 has read the model


def _read(folder: pathlib.Path) -> dict[str, Any]:
    """Each rank: the parts for it; its random generators are set."""
    summary = files.summary_of(folder)
    parts = files.read(folder / files.MODEL)
    mine = files.read(folder / _own_file(summary))
    if outcomes.rank() < summary["size"]:
        samples.restore_random_states(mine["random"])
    else:
        samples.derive_random_states(mine["random"], outcomes.rank())
    return {**parts, **mine["own"]}


def _own_file(summary: dict[str, Any]) -> str:
    return files.part_of(outcomes.rank() if outcomes.rank() < summary["size"] else 0)


def _versions() -> dict[str, str]:
    return {
        "torchmpi_py": torchmpi_py.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
