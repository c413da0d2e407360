"""Parameters that are split: each rank of a communicator holds a part, and no other rank of it the same one.

Where several such groups train together, the ranks with the same part in each are replicas of each other: gradients are
reduced, and values broadcast, among the replicas alone. An unsplit parameter has a replica on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core import communicators
from torchmpi_py.core.communicators import Communicator

_ATTRIBUTE = "_torchmpi_split"
_replicas: WeakKeyDictionary[Communicator, WeakKeyDictionary[Communicator, Communicator]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Split:
    """How a tensor is split: rank r of ``comm`` holds ``sizes[r]`` of its indices along ``dim``, in rank order."""

    comm: Communicator
    dim: int
    sizes: tuple[int, ...]

    @classmethod
    def even(cls, comm: Communicator, dim: int, size: int) -> Split:
        """Parts of equal size; where that does not divide, the first ranks hold one index more."""
        least, more = divmod(size, comm.size)
        return cls(comm, dim, tuple(least + (rank < more) for rank in range(comm.size)))

    @property
    def begin(self) -> int:
        """The first index of this rank's part."""
        return next(begin for rank, begin in enumerate(accumulate(self.sizes, initial=0)) if rank == self.comm.rank)

    @property
    def size(self) -> int:
        """The number of indices of this rank's part."""
        return self.sizes[self.comm.rank]

    def whole_shape(self, part: Tensor) -> torch.Size:
        """The shape of the whole of which ``part`` is a part."""
        shape = list(part.shape)
        shape[self.dim] = sum(self.sizes)
        return torch.Size(shape)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor: a view."""
        return whole.narrow(self.dim, self.begin, self.size)

    def whole_of(self, part: Tensor) -> Tensor:
        """The whole tensor, from the parts of all ranks. Collective over ``comm``."""
        if self.comm.size == 1:
            return part.clone()
        rows: Tensor = verbs.allgather(part.movedim(self.dim, 0).contiguous(), comm=self.comm)
        return rows.movedim(0, self.dim)


def mark(parameter: torch.nn.Parameter, split: Split) -> None:
    """Say how a parameter is split."""
    setattr(parameter, _ATTRIBUTE, split)


def split_of(parameter: Tensor) -> Split | None:
    """How a parameter is split; None for one that is not."""
    split: Split | None = getattr(parameter, _ATTRIBUTE, None)
    return split


def replicas_of(parameter: Tensor, comm: Communicator) -> Communicator:
    """The ranks of ``comm`` that hold the same part of a parameter. Collective over ``comm``, once for each split."""
    split = split_of(parameter)
    if split is None:
        return comm
    of_comm = _replicas.setdefault(comm, WeakKeyDictionary())
    if split.comm not in of_comm:
        of_comm[split.comm] = communicators.divide(comm, split.comm.rank, f"replicas of part {split.comm.rank}")
    return of_comm[split.comm]


def by_replicas(named: Mapping[str, Tensor], comm: Communicator) -> list[tuple[Communicator, dict[str, Tensor]]]:
    """The tensors by the ranks that hold the same: first those of all ranks of ``comm``. Collective over ``comm``."""
    groups: dict[Communicator, dict[str, Tensor]] = {comm: {}}
    for name, x in named.items():
        groups.setdefault(replicas_of(x, comm), {})[name] = x
    return list(groups.items())


def any_split(parameters: Iterable[Tensor]) -> bool:
    """Whether a parameter is split."""
    return any(split_of(p) is not None for p in parameters)
