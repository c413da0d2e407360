"""Whether the ranks launch the reductions of several registrations in the same order.

The buckets of one registration (``async_backward``) have a fixed order. Those of two registrations on one communicator
are launched as autograd reaches them, which may be in another order on another rank: that computes the outputs of two
networks in another order, or leaves out a layer. Buckets of one size would then be added to each other. So each
registration notes at which places of the communicator's launches its own are, and a digest of its number, of these
places, and of the number of reductions since its compression was restarted
travels behind the flags that are reduced anyway, by ``max``: the digest and its complement add up to 255 in every byte,
if all are equal. Launches on communicators of fewer ranks, those of split parameters, do not count.
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

    def restart(self) -> None:
        """What compression has kept is dropped, before a reduction that is the same one on all ranks."""
        self._age = 0

    def begin(self) -> None:
        """Begin a reduction."""
        self._digest = self._number

    def add(self) -> None:
        """Note a launch."""
        self._digest = zlib.crc32(next(self._places).to_bytes(8, "little"), self._digest)

    def append_digest(self, flags: Tensor) -> Tensor:
        """The flags, with the digest behind them, to be reduced by ``max``."""
        digest = list(zlib.crc32(self._age.to_bytes(8, "little"), self._digest).to_bytes(_BYTES, "little"))
        self._age += 1
        both = [*digest, *(255 - byte for byte in digest)]
        return torch.cat([flags, torch.tensor(both, dtype=torch.uint8, device="cpu")])

    @staticmethod
    def checked(reduced: Tensor) -> Tensor:
        """The reduced flags without the digest. RanksDisagree, on all ranks, if digests differ."""
        flags, digest = reduced.tensor_split([reduced.numel() - 2 * _BYTES])
        if any(int(byte) + int(complement) != 255 for byte, complement in digest.view(2, _BYTES).T.tolist()):
            raise RanksDisagree(
                "the backward passes of the ranks reach modules with registrations of their own "
                "(register_async_backward, or optimizers of optim) in different orders, so that gradients of one were "
                "added to those of another: their outputs are computed in another order, or a rank leaves out a layer. "
                "Register one module that holds them all, as torch.nn.ModuleList([a, b]). Or, with compression, only "
                "some ranks have loaded a state since the last step: call load_state_dict (or restart) on every rank"
            )
        return flags
