"""Whether the ranks are in the same step, and launch the reductions of several registrations in the same order.

The buckets of one registration (``async_backward``) have a fixed order. Those of two registrations on one communicator
are launched as autograd reaches them, which may be in another order on another rank: that computes the outputs of two
networks in another order, or leaves out a layer. Buckets of one size would then be added to each other. So each
registration notes at which places of the communicator's launches its own are, and a digest of its number, of these
places, and of the number of reductions since its compression was restarted
travels behind the flags that are reduced anyway, by ``max``: the digest and its complement add up to 255 in every byte,
if all are equal. Launches on communicators of fewer ranks, those of split parameters, do not count.

A rank that leaves out a step (it catches an error of a bad batch, and continues) makes the same launches as the others,
one step later. What differs is how often the loop has called the optimizer's ``zero_grad`` and ``step`` since the last
reduction. These two counts travel beside the digest. A rank that takes part without a backward pass, or in ``join``,
where ranks may have different numbers of batches, sends zeros in place of both, which ``max`` ignores.
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

_counts: WeakKeyDictionary[Communicator, tuple[Iterator[int], Iterator[int]]] = WeakKeyDictionary()
"""Of each communicator the numbers of registrations, and of launches of all of them."""


class LaunchOrder:
    """The places of one registration's launches in its present reduction. All ranks make registrations alike."""

    def __init__(self, comm: Communicator) -> None:
        numbers, self._places = _counts.setdefault(comm, (itertools.count(), itertools.count()))
        self._number = next(numbers)
        self._digest = 0
        self._age = 0  # reductions since the last restart
        self.num_steps = 0  # complete reductions
        self.num_zero_grads = self.num_updates = 0  # of the optimizer, since the last reduction
        self._counts = [0, 0]  # those of the reduction under way

    def restart(self) -> None:
        """What compression has kept is dropped, before a reduction that is the same one on all ranks."""
        self._age = 0

    def begin(self) -> None:
        """Begin a reduction."""
        self._digest = self._number

    def add(self) -> None:
        """Note a launch."""
        self._digest = zlib.crc32(next(self._places).to_bytes(8, "little"), self._digest)

    def append_numbers(self, flags: Tensor, *, compares_steps: bool) -> Tensor:
        """The flags, with digest and counts behind them, to be reduced by ``max``. The counts start again."""
        digest = list(zlib.crc32(self._age.to_bytes(8, "little"), self._digest).to_bytes(_BYTES, "little"))
        self._age += 1
        self._counts = [min(self.num_zero_grads, 255), min(self.num_updates, 255)]
        self.num_zero_grads = self.num_updates = 0
        numbers = [*digest, *self._counts]
        both = [*numbers, *(255 - number for number in numbers)]
        if not compares_steps:
            both[_BYTES : _BYTES + 2] = both[-2:] = [0, 0]
        return torch.cat([flags, torch.tensor(both, dtype=torch.uint8, device="cpu")])

    def checked(self, reduced: Tensor) -> Tensor:
        """The reduced flags without the numbers. RanksDisagree, on all ranks, if these differ."""
        flags, numbers = reduced.tensor_split([reduced.numel() - 2 * (_BYTES + 2)])
        *digest, zero_grads, updates = [(most, 255 - rest) for most, rest in numbers.view(2, -1).T.tolist()]
        self._check_steps("zero_grad()", *zero_grads, self._counts[0], self.num_steps + 1 - zero_grads[1])
        self._check_steps("step()", *updates, self._counts[1], self.num_steps + 1 - updates[0])
        if any(most != least for most, least in digest):
            raise RanksDisagree(
                "the backward passes of the ranks reach modules with registrations of their own "
                "(register_async_backward, or optimizers of optim) in different orders, so that gradients of one were "
                "added to those of another: their outputs are computed in another order, a rank leaves out a layer, or "
                "its backward pass raised an error and the program went on. Register one module that holds them all, "
                "as torch.nn.ModuleList([a, b]). Or, with compression, only some ranks have loaded a state since the "
                "last step: call load_state_dict (or restart) on every rank"
            )
        self.num_steps += 1
        return flags

    @staticmethod
    def _check_steps(call: str, most: int, least: int, here: int, base: int) -> None:
        """RanksDisagree if ranks have made the call ``most`` and ``least`` times; ``base`` plus that is their step."""
        if most > least:
            raise RanksDisagree(
                f"the ranks are in different steps: a rank is in its step {base + most}, another in its step "
                f"{base + least}, this one in its step {base + here}, because they have called {call} {most}, {least} "
                f"and {here} times since the last reduction. A rank has left out a step, as by going on after an "
                "error of a bad batch. Leave it out on all ranks (decide by mpi.allreduce), or use mpi.join(...), "
                "where ranks may have different numbers of batches"
            )
