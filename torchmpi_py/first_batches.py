"""Whether two ranks train on the same data: digests of the first batches travel with what is reduced anyway.

A loop that gives every rank the same batches runs, and is as slow as many and as good as one. So the ranks compare the
digests of their first batches, or, in a loop that shows none, of the gradients before their first reductions, which are
equal where the batches are. A digest is laid into this rank's place behind the flags of the last of these reductions
(``Buckets.received``), which goes by ``max``: no collective is added.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchmpi_py import digests
from torchmpi_py.communicators import Communicator

logger = logging.getLogger("torchmpi_py")

_NUM_PASSES = 2  # one batch may be the same by chance
_BYTES = 8
_HEAD = 1024  # elements of a gradient
_NOTHING = b"\0" * _BYTES


class FirstBatches:
    """What the first backward passes of this rank have seen. All ranks of ``comm`` make the same passes."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._passes_left = _NUM_PASSES if comm.size > 1 else 0
        self._of_passes: list[bytes] = []
        self._batch: bytes | None = None  # of the pass under way
        self._gradients: list[bytes] = []

    def look(self, batch: Any | None) -> None:
        """Note the batch of the next pass; None: one that says nothing, such as a stand-in."""
        if self._passes_left:
            self._batch = _NOTHING if batch is None else digests.of(batch)

    def look_at_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """``look_at_gradient`` of each; nothing after the first passes."""
        if self._passes_left:
            for parameter in parameters:
                self.look_at_gradient(parameter)

    def look_at_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Note a gradient that is not reduced yet, where no batch is known. One of zeros says nothing."""
        if self._passes_left and self._batch is None and parameter.grad is not None:
            head = parameter.grad.detach().reshape(-1)[:_HEAD]
            if head.any():
                self._gradients.append(digests.of(head))

    def attach(self, flags: Tensor) -> Tensor:
        """End a pass. The flags to reduce by ``max``, in the last pass that counts with the digests behind them."""
        if not self._passes_left:
            return flags
        self._passes_left -= 1
        gradients = digests.of(self._gradients) if self._gradients else _NOTHING
        self._of_passes.append(gradients if self._batch is None else self._batch)
        self._batch, self._gradients = None, []
        if self._passes_left:
            return flags
        places = torch.zeros(self.comm.size, _BYTES, dtype=torch.uint8, device="cpu")
        if _NOTHING not in self._of_passes:
            places[self.comm.rank] = torch.tensor(list(digests.of(self._of_passes)), dtype=torch.uint8, device="cpu")
        return torch.cat([flags, places.view(-1)])

    def compare(self, places: Tensor) -> None:
        """Warn, on rank 0, if two ranks have the same digest; of the reduced flags what lies behind the flags."""
        if self.comm.rank > 0 or places.numel() == 0:
            return
        ranks_of: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(places.view(-1, _BYTES)):
            ranks_of.setdefault(bytes(digest.tolist()), []).append(rank)
        ranks_of.pop(_NOTHING, None)
        same = [", ".join(map(str, ranks)) for ranks in ranks_of.values() if len(ranks) > 1]
        if same:
            _warn("; ".join(same), self.comm.size)


@functools.cache
def _warn(ranks: str, size: int) -> None:
    """Once a process is enough."""
    logger.warning(
        "ranks %s of %d train on the same batches, so that they do the same work: give each its share, with "
        "DataLoader(dataset, ..., sampler=mpi.shard(dataset)) or DatasetIterator(dataset, ...); a sampler or an "
        "IterableDataset of your own takes its part by mpi.rank() and mpi.size()",
        ranks,
        size,
    )
