"""Checkpoints: what a job needs to go on after it was killed, one file per step in a folder.

A checkpoint consists of *parts*: what is equal on all ranks (the model), and what is each rank's *own* (its random
generators). Only rank 0 touches the disk, so the folder need not be shared between hosts.

A save: the ranks send rank 0 their own parts, rank 0 writes the file (``checkpoint_file``) and removes the oldest. A
load: rank 0 reads the newest file that is not damaged and broadcasts its bytes. An error of one rank at any of these
points is raised on all ranks (``outcomes``), so a full disk never leaves the others waiting.

Rank 0 takes a lock on the folder before the first save (``folder_lock``), so that two jobs never save into one folder.
A load needs no lock.

Alternative: each rank writes a file of its own (torchmpi_py 0.1, ``torch.distributed.checkpoint``). That is faster for
parameters and optimizers which no rank can hold as a whole, and needs a shared file system, and a folder of files which
is complete only when all are.
"""

from __future__ import annotations

import errno
import io
import logging
import operator
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from torchmpi_py.collectives import verbs
from torchmpi_py.engine import checkpoint_file as files, folder_lock, outcomes, samples

logger = logging.getLogger("torchmpi_py")

_PIECE_BYTES = 1 << 30  # of a broadcast, so that its timeout is that of a piece

Collected = tuple[Mapping[str, Any], Mapping[str, Any]]
"""What is equal on all ranks, and what is each rank's own."""


class Saved(NamedTuple):
    """The result of ``Checkpoints.load``."""

    step: int
    parts: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder, for training loops of your own (the extension ``Checkpoint`` uses it too).

    Every rank of the current level makes the same calls; only rank 0 reads and writes files. One job at a time saves
    into a folder; other jobs may load. Works in a world of one, and without ``mpi.start()``, too.

    Args:
        directory: The folder; rank 0 makes it.
        keep: The number of checkpoints to keep, the newest ones.

    Raises:
        CheckpointError: By ``save``, ``load`` and ``hold``, on every rank: rank 0 cannot write or read, or another job
            saves into the folder.

    Example:
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
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep={keep!r}: expected the number of checkpoints to keep, at least 1")
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        self._damaged: list[pathlib.Path] = []  # what load passed over
        self._lock: folder_lock.FolderLock | None = None  # rank 0's, as long as this object lives

    def hold(self) -> None:
        """Keep other jobs from saving into the folder, as the first `save` does. Collective.

        The folder is free again after `release`, and when the process of rank 0 has ended. CheckpointError, on all
        ranks, that names the other job if one saves into the folder.
        """
        outcomes.of_rank_0(self._hold, "the folder cannot be used")

    def release(self) -> None:
        """Let other jobs save into the folder. Not collective; a later `save` takes the folder again."""
        self._lock = None

    def save(self, step: int, parts: Mapping[str, Any], *, own: Mapping[str, Any] | None = None) -> pathlib.Path:
        """Write a checkpoint, remove the oldest, and return its file. Collective.

        The states of the global random generators are saved too. A checkpoint of the same step is replaced.

        Args:
            step: The number of the step; not lower than that of the newest checkpoint in the folder.
            parts: What is equal on all ranks (state_dicts, tensors, numbers, strings, lists and dicts of such); rank
                0's is written.
            own: What is each rank's own, under other names.

        Raises:
            CheckpointError: On all ranks, for what cannot be read back as plain data, for a step that is negative or
                before the newest one, and if the file cannot be written.
        """
        return self.save_collected(step, lambda: (parts, own or {}))

    def save_collected(self, step: int, collect: Callable[[], Collected]) -> pathlib.Path:
        """Like ``save``; ``collect`` gives (parts, own), and an error in it on one rank is raised on all."""
        what, collected = f"step {step} cannot be saved", []

        def pack() -> int:
            if operator.index(step) < 0:
                raise ValueError(f"step={step} must not be negative")
            parts, own = (files.compact(dict(each)) for each in collect())
            if both := sorted(parts.keys() & own.keys()):
                raise ValueError(f"{both} are both in parts and in own: give them different names")
            collected.append((parts, _bytes(files.packed({"own": own, "random": samples.random_states()}))))
            return len(collected[0][1])

        sizes = outcomes.of_all(pack, what)
        parts, own = collected[0]
        whole = verbs.gather(own) if len(sizes) > 1 else own
        return outcomes.of_rank_0(lambda: self._write(operator.index(step), parts, torch.split(whole, sizes)), what)

    def load(self) -> Saved | None:
        """Return the last complete checkpoint, as (step, parts), or None if there is none. Collective.

        A rank's own parts are among the parts. Tensors are on the CPU. The global random generators are set to what
        they were on this rank. A rank that the saved job did not have gets rank 0's own parts, and random numbers that
        follow from rank 0's and its number.
        """
        files_read: list[io.BytesIO] = []
        newest = outcomes.of_rank_0(lambda: self._find(files_read), "the checkpoints cannot be read")
        if newest is None:
            return None
        step, num_bytes = newest
        stream = files_read[0] if files_read else io.BytesIO(bytes(num_bytes))
        if outcomes.size() > 1:
            for piece in torch.split(_bytes(stream.getbuffer()), _PIECE_BYTES):
                verbs.broadcast(piece)
        parts: dict[str, Any] = {}
        outcomes.of_all(lambda: parts.update(_unpacked(stream)), f"step {step} of {self.directory} cannot be read")
        return Saved(step, parts)

    def _hold(self) -> None:
        """Rank 0: make the folder, and take the lock."""
        files.make_folder(self.directory)
        if not os.access(self.directory, os.W_OK):
            raise PermissionError(errno.EACCES, "this user cannot write into it", str(self.directory))
        self._lock = folder_lock.take(self.directory)

    def _write(self, step: int, parts: Mapping[str, Any], own: Sequence[torch.Tensor]) -> pathlib.Path:
        """Rank 0: write the file, and remove the oldest."""
        self._hold()
        # A damaged checkpoint of a later step must not keep a run from saving this one.
        for path in self._damaged:
            files.discard(path, aside=path.with_name(f"{path.name}.damaged"))
        self._damaged.clear()
        files.tidy(self.directory)
        newest = max((saved for saved, _ in files.complete(self.directory)), default=-1)
        if newest > step:
            raise ValueError(
                f"{self.directory} holds a checkpoint of step {newest}, which is later than {step}: load() it first, "
                "remove it, or use another folder"
            )
        path = self.directory / f"step-{step:06}.pt"
        files.write(path, {"step": step, "parts": parts, "own": list(own)})
        for _, old in files.complete(self.directory)[self.keep :]:
            files.discard(old)
        return path

    def _find(self, files_read: list[io.BytesIO]) -> tuple[int, int] | None:
        """Rank 0: read the newest file that is not damaged; its step and number of bytes."""
        for step, path in files.complete(self.directory):
            try:
                files_read.append(files.read(path))
            except FileNotFoundError:
                return self._find(files_read)  # another job that saves has removed it, and has a later one
            except files.Damaged as damage:
                self._damaged.append(path)
                logger.warning("checkpoint %s is damaged and passed over: %s", path, damage)
            else:
                return step, len(files_read[0].getbuffer())
        return None


def check_collected(parts: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Each rank: raise TypeError where a save of this rank's share of these would, without the numbers of tensors."""

    def emptied(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(0) if type(x) in (torch.Tensor, torch.nn.Parameter) and not vars(x) else x

    for content in (parts, own) if outcomes.rank() == 0 else (own,):
        files.packed(files.compact(tree_map_only(torch.Tensor, emptied, dict(content))))


def _bytes(content: Any) -> torch.Tensor:
    """A tensor over the memory of the bytes."""
    return torch.frombuffer(content, dtype=torch.uint8)


def _unpacked(stream: io.BytesIO) -> dict[str, Any]:
    """Each rank: the parts for it; its random generators are set."""
    content, rank = files.unpacked(stream), outcomes.rank()
    is_new = rank >= len(content["own"])
    of_rank = files.unpacked(io.BytesIO(content["own"][0 if is_new else rank].numpy().tobytes()))
    if is_new:
        samples.derive_random_states(of_rank["random"], rank)
    else:
        samples.restore_random_states(of_rank["random"])
    return {**content["parts"], **of_rank["own"]}
