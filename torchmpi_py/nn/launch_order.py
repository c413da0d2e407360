"""Whether the ranks are in the same step, and launch the reductions of several registrations in the same order.

The buckets of one registration (``async_backward``) have a fixed order. Those of two registrations on one communicator
are launched as autograd reaches them, which may be in another order on another rank: that computes the outputs of two
networks in another order, or leaves out a layer. Buckets of one size would then be added to each other. So each
registration notes at which places of the communicator's launches its own are. A digest of its number, of these places,
and of the number of reductions since its compression was restarted travels behind the flags that are reduced anyway, by
``max``: the digest and its complement add up to 255 in every byte if all are equal.

A rank that leaves out the optimizer's ``step`` (it catches an error, and continues) makes the same launches as the
others, and has other parameters from then on. So the number of updates since the last reduction travels beside the
digest. A rank that takes part without a backward pass, or after it has loaded a state, or in ``join``, where ranks may
have different numbers of batches, sends zeros in place of the number, which ``max`` ignores. Calls of ``zero_grad`` are
not compared: an extra call changes nothing, and ranks that agree to leave out a batch may differ in it.
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

_BYTES = 4  # of a digest

_counts: WeakKeyDictionary[Communicator, Iterator[int]] = WeakKeyDictionary()
"""Counts the registrations and the launches of each communicator."""


class LaunchOrder:
    """The places of one registration's launches in its present reduction. All ranks make registrations alike."""

    def __init__(self, comm: Communicator) -> None:
        self._places = _counts.setdefault(comm, itertools.count())
        self._number = next(self._places)
        self._digest = 0
        self.age = 0  # reductions since compression has dropped what it kept, in the same reduction on all ranks
        self.num_steps = 0  # complete reductions
        self.num_updates = 0  # by the optimizer, since the last reduction
        self.has_loaded = False  # a state since then, so that the number says nothing of the parameters
        self._updates_here = 0  # the same, of the reduction under way

    def begin(self) -> None:
        """Begin a reduction."""
        self._digest = self._number

    def add(self) -> None:
        """Note a launch."""
        self._digest = zlib.crc32(next(self._places).to_bytes(8, "little"), self._digest)

    def append_numbers(self, flags: Tensor, *, compares_steps: bool) -> Tensor:
        """The flags, with digest and updates behind them, to be reduced by ``max``. The updates start again."""
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
        """The reduced flags without the numbers. RanksDisagree, on all ranks, if these differ."""
        flags, numbers = reduced.tensor_split([reduced.numel() - 2 * (_BYTES + 1)])
        *digest, (most, least) = [(most, 255 - rest) for most, rest in numbers.view(2, -1).T.tolist()]
        if most > least:
            first, last, here = (self.num_steps + 1 - most + updates for updates in (least, most, self._updates_here))
            raise RanksDisagree(
                f"the ranks are in different steps: a rank is in its step {last}, another in its step {first}, this "
                f"one in its step {here}. A rank has left out step(), such as after an error, and its parameters "
                "differ. Leave it out on all ranks (decide by mpi.allreduce), and load a state on all ranks"
            )
        if any(most != least for most, least in digest):
            raise RanksDisagree(
                "the backward passes of the ranks reach modules with registrations of their own "
                "(register_async_backward, or optimizers of optim) in different orders, so that their gradients were "
                "mixed up: a rank computes the outputs in another order, leaves out a layer, or went on after an error "
                "in its pass. Register one module that holds them all, such as torch.nn.ModuleList([a, b]). Or, with "
                "compression, only some ranks have loaded a state: call load_state_dict (or restart) on every rank"
            )
        self.num_steps += 1
        return flags
