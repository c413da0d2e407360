"""Checkpoints: the data from which a killed job resumes. A folder contains one file per saved step.

A checkpoint consists of *parts*, which are equal on all ranks (such as the model), and of each rank's *own* parts (such
as its random generators). Only rank 0 reads and writes files, so the hosts need not share the folder.

To save, the ranks send their own parts to rank 0, which writes the file (see ``checkpoint_file``) and removes surplus
old files. To load, rank 0 reads the newest file that is not damaged, and broadcasts its bytes. If any rank fails in one
of these steps, all ranks raise an error (see ``outcomes``), so a full disk never leaves the other ranks waiting.

Rank 0 locks the folder before the first save (see ``folder_lock``), so two jobs never save into one folder. A load
needs no lock.

Alternative: each rank writes its own file (torchmpi_py 0.1, ``torch.distributed.checkpoint``). This is faster for
models that are too large for one rank. Why not: it needs a shared file system, and a checkpoint is complete only when
all of its files are complete.
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

_PIECE_BYTES = 1 << 30  # bytes per broadcast; the timeout applies to each broadcast

Collected = tuple[Mapping[str, Any], Mapping[str, Any]]
"""(parts, own): the parts that are equal on all ranks, and this rank's own parts."""


class Saved(NamedTuple):
    """A checkpoint that ``Checkpoints.load`` has read.

    Attributes:
        step (int): number of the step after which the checkpoint was saved.
        parts (dict): the saved data by name, including this rank's own parts.
    """

    step: int
    parts: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder, for your own training loop. The extension ``Checkpoint`` uses this class too.

    Every rank of the current level must make the same calls; only rank 0 reads and writes files. One job at a time may
    save into a folder, but other jobs may load from it. The class also works with one rank, and without
    ``mpi.start()``.

    Args:
        directory (path): folder of the files; rank 0 creates it.
        keep (int): number of newest checkpoints to keep; default 3.

    Raises:
        ValueError: ``keep`` is below 1.
        CheckpointError: rank 0 cannot write or read the files, or another job saves into the folder. ``save``,
            ``load`` and ``hold`` raise it on every rank.

    Examples:
        >>> import tempfile
        >>> checkpoints = mpi.engine.Checkpoints(mpi.broadcast_object(tempfile.mkdtemp()))
        >>> net = torch.nn.Linear(4, 1)
        >>> saved = checkpoints.load()  # None in the first run
        >>> if saved is not None:
        ...     net.load_state_dict(saved.parts["model"])
        >>> first = 0 if saved is None else saved.step
        >>> for step in range(first, 4):
        ...     # train one step here
        ...     if (step + 1) % 2 == 0:
        ...         path = checkpoints.save(step + 1, {"model": net.state_dict()})
        >>> checkpoints.load().step
        4
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep={keep!r}: pass the number of checkpoints to keep, at least 1")
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        self._damaged: list[pathlib.Path] = []  # damaged files that load() has skipped
        self._lock: folder_lock.FolderLock | None = None  # lock of rank 0, released with this object

    def hold(self) -> None:
        """Lock the folder, so that no other job can save into it. Every rank must make this call.

        ``save`` also locks the folder. The lock ends with ``release``, or when the process of rank 0 ends.

        Raises:
            CheckpointError: another job saves into the folder. Every rank raises the error, which describes the job.
        """
        outcomes.of_rank_0(self._hold, "the folder cannot be used")

    def release(self) -> None:
        """Unlock the folder for other jobs. The ranks do not communicate. A later ``save`` locks the folder again."""
        self._lock = None

    def save(self, step: int, parts: Mapping[str, Any], *, own: Mapping[str, Any] | None = None) -> pathlib.Path:
        """Write a checkpoint, and remove all but the newest ``keep``. Every rank must make this call.

        The states of the global random generators are saved too. A checkpoint of the same step is replaced.

        Args:
            step (int): number of the step, not lower than the step of the newest checkpoint in the folder.
            parts (mapping): data that is equal on all ranks: state_dicts, tensors, numbers, strings, and lists and
                dicts of these. Rank 0's data is written.
            own (mapping): this rank's own data, keyed by names that ``parts`` does not use; default None.

        Returns:
            The path of the file.

        Raises:
            CheckpointError: a value is not plain data, the step is negative or lower than the newest saved step, or the
                file cannot be written. Every rank raises the error.
        """
        return self.save_collected(step, lambda: (parts, own or {}))

    def save_collected(self, step: int, collect: Callable[[], Collected]) -> pathlib.Path:
        """Write a checkpoint of the data that ``collect`` returns. Every rank must make this call.

        Args:
            step (int): number of the step, as for ``save``.
            collect (callable): function without arguments, called on every rank, that returns (parts, own) as for
                ``save``.

        Returns:
            The path of the file.

        Raises:
            CheckpointError: ``collect`` raises an error on any rank, or ``save`` cannot write the data. Every rank
                raises the error.
        """
        what, collected = f"step {step} cannot be saved", []

        def pack() -> int:
            if operator.index(step) < 0:
                raise ValueError(f"step={step}: pass a number of at least 0")
            parts, own = (files.compact(dict(each)) for each in collect())
            if both := sorted(parts.keys() & own.keys()):
                raise ValueError(f"save: parts and own both have {both}; use different names")
            collected.append((parts, _bytes(files.packed({"own": own, "random": samples.random_states()}))))
            return len(collected[0][1])

        sizes = outcomes.of_all(pack, what)
        parts, own = collected[0]
        whole = verbs.gather(own) if len(sizes) > 1 else own
        return outcomes.of_rank_0(lambda: self._write(operator.index(step), parts, torch.split(whole, sizes)), what)

    def load(self) -> Saved | None:
        """Return the newest complete checkpoint. Every rank must make this call.

        **Overwrites** the states of the global random generators with this rank's saved states. A rank that did not
        exist in the saved job gets rank 0's own parts, and derives its random states from rank 0's states and its own
        rank number.

        Returns:
            A ``Saved`` (step, parts), or None if the folder contains no checkpoint. ``parts`` includes this rank's own
            parts. Tensors are on the CPU.

        Raises:
            CheckpointError: the files cannot be read. Every rank raises the error.
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
        """Create the folder, and lock it. Only rank 0 calls this method."""
        files.make_folder(self.directory)
        if not os.access(self.directory, os.W_OK):
            raise PermissionError(errno.EACCES, "you may not write here; use another folder", str(self.directory))
        self._lock = folder_lock.take(self.directory)

    def _write(self, step: int, parts: Mapping[str, Any], own: Sequence[torch.Tensor]) -> pathlib.Path:
        """Write the file, and remove all but the newest ``keep`` files. Only rank 0 calls this method."""
        self._hold()
        # A damaged checkpoint of a later step must not prevent a run from saving this step.
        for path in self._damaged:
            files.discard(path, aside=path.with_name(f"{path.name}.damaged"))
        self._damaged.clear()
        files.tidy(self.directory)
        newest = max((saved for saved, _ in files.complete(self.directory)), default=-1)
        if newest > step:
            raise ValueError(
                f"{self.directory} has a checkpoint of step {newest}, which is later than {step}; to continue from "
                f"step {newest}, call load() before save(), or else use another folder"
            )
        path = self.directory / f"step-{step:06}.pt"
        files.write(path, {"step": step, "parts": parts, "own": list(own)})
        for _, old in files.complete(self.directory)[self.keep :]:
            files.discard(old)
        return path

    def _find(self, files_read: list[io.BytesIO]) -> tuple[int, int] | None:
        """Append the bytes of the newest file that is not damaged to ``files_read``; return its step and length.

        Return None if there is no such file. Only rank 0 calls this method.
        """
        for step, path in files.complete(self.directory):
            try:
                files_read.append(files.read(path))
            except FileNotFoundError:
                return self._find(files_read)  # Another job has removed this file and saved a later one.
            except files.Damaged as damage:
                self._damaged.append(path)
                logger.warning("checkpoint %s is damaged and was skipped: %s", path, damage)
            else:
                return step, len(files_read[0].getbuffer())
        return None


def check_collected(parts: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise TypeError if this rank's data cannot be saved. To be fast, do not copy the values of tensors."""

    def emptied(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(0) if type(x) in (torch.Tensor, torch.nn.Parameter) and not vars(x) else x

    for content in (parts, own) if outcomes.rank() == 0 else (own,):
        files.packed(files.compact(tree_map_only(torch.Tensor, emptied, dict(content))))


def _bytes(content: Any) -> torch.Tensor:
    """Return a uint8 tensor that shares the memory of these bytes."""
    return torch.frombuffer(content, dtype=torch.uint8)


def _unpacked(stream: io.BytesIO) -> dict[str, Any]:
    """Return the parts for this rank from the bytes of a file, and restore the random generators."""
    content, rank = files.unpacked(stream), outcomes.rank()
    is_new = rank >= len(content["own"])
    of_rank = files.unpacked(io.BytesIO(content["own"][0 if is_new else rank].numpy().tobytes()))
    if is_new:
        samples.derive_random_states(of_rank["random"], rank)
    else:
        samples.restore_random_states(of_rank["random"])
    return {**content["parts"], **of_rank["own"]}
