"""Check that the ranks are in the same step, and launch the reductions of several registrations in the same order.

The buckets of one registration (``async_backward``) have a fixed order. Two registrations on one communicator are
launched in the order in which autograd reaches them. That order differs between ranks if one rank computes the outputs
of two networks in a different order, or omits a layer. Buckets of equal size would then be added to each other,
although they contain gradients of different parameters.

The idea: all registrations and launches on a communicator are numbered by one counter. Each registration hashes the
numbers of its launches, its own number, and the age of its compression, which is a number of reductions. This digest
and its complement are appended to the flags, which are reduced by ``max`` anyway. If all ranks have the same digest,
every reduced byte and its reduced complement add up to 255. An alternative is a collective that compares the orders
before each reduction. It was rejected because it would add a message to each step and delay the first bucket.

A rank that skips the optimizer's ``step``, for example because it caught an error, makes the same launches as the other
ranks, but its parameters differ from then on. So each rank also sends the number of updates since the last reduction. A
rank without a backward pass sends zeros instead, which do not affect the maximum. A rank also sends zeros after it has
loaded a state, and in ``join``, where ranks may have different numbers of batches. Calls of ``zero_grad`` are not
compared, because an extra call changes nothing, and ranks that agree to skip a batch may differ in these calls.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchmpi_py.core.communicators import Communicator
from torchmpi_py.errors import RanksDisagree

_BYTES = 4  # bytes of a digest

_counts: WeakKeyDictionary[Communicator, Iterator[int]] = WeakKeyDictionary()
"""For each communicator, the counter that numbers its registrations and launches."""


class LaunchOrder:
    """The digest of one registration's launches, and its counts of steps and updates.

    All ranks of ``comm`` must create the same registrations, in the same order.
    """

    def __init__(self, comm: Communicator) -> None:
        self._places = _counts.setdefault(comm, itertools.count())
        self._number = next(self._places)
        self._digest = 0
        self.age = 0  # reductions since the compressors were reset
        self.num_steps = 0  # complete reductions
        self.num_updates = 0  # updates since the last reduction
        self.has_loaded = False  # whether a state was loaded since the last reduction
        self._updates_here = 0  # num_updates at the launch of the pending reduction

    def begin(self) -> None:
        """Reset the digest for a new reduction."""
        self._digest = self._number

    def add(self) -> None:
        """Add the number of a launch to the digest."""
        self._digest = zlib.crc32(next(self._places).to_bytes(8, "little"), self._digest)

    def append_numbers(self, flags: Tensor, *, compares_steps: bool) -> Tensor:
        """Append the digest, the number of updates and their complements to the flags. Reset the number of updates."""
        digest = list(zlib.crc32(self.age.to_bytes(8, "little"), self._digest).to_bytes(_BYTES, "little"))
        self.age += 1
        self._updates_here = min(self.num_updates, 255)
        numbers = [*digest, self._updates_here]
        both = [*numbers, *(255 - number for number in numbers)]
        if not compares_steps or self.has_loaded:
            both[_BYTES] = both[-1] = 0
        self.num_updates, self.has_loaded = 0, False
        return torch.cat([flags, torch.tensor(both, dtype=torch.uint8, device="cpu")])

    def checked(self, reduced: Tensor) -> Tensor:
        """Return the reduced flags without the numbers. Raise RanksDisagree, on all ranks, if the numbers differ."""
        flags, numbers = reduced.tensor_split([reduced.numel() - 2 * (_BYTES + 1)])
        *digest, (most, least) = [(most, 255 - rest) for most, rest in numbers.view(2, -1).T.tolist()]
        if most > least:
            first, last, here = (self.num_steps + 1 - most + updates for updates in (least, most, self._updates_here))
            raise RanksDisagree(
                f"the ranks are in different steps: one rank is in step {last}, another in step {first}, this rank in "
                f"step {here}. A rank has skipped step(), for example after an error, so its parameters differ. Load "
                "the same state on all ranks; to skip a step, skip it on all ranks (decide by mpi.allreduce)"
            )
        if any(most != least for most, least in digest):
            raise RanksDisagree(
                "the backward passes of the ranks reach several registrations (register_async_backward, or optimizers "
                "of optim) in different orders, so their gradients were mixed up. A rank computes outputs in another "
                "order, omits a layer, or continued after an error in its backward pass. Register one module that "
                "contains all modules, such as torch.nn.ModuleList([a, b]). With compression, another cause is that "
                "only some ranks have loaded a state; call load_state_dict (or restart) on every rank"
            )
        self.num_steps += 1
        return flags
