"""Memory for DDP's buckets, kept from step to step.

A bucket is known by its parameters, for several modules may share a group, each with a bucket number 0. When DDP has
arranged a module's parameters anew, the new buckets get memory of their own, and that of an old one goes when its last
parameter has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Kept(NamedTuple):
    """Symmetric memory for a bucket of so many parameters; None where there is none to be had."""

    memory: Tensor | None
    num_parameters: int


class BucketMemory:
    """Those of the modules of one process group."""

    def __init__(self) -> None:
        self._of: Any = WeakTensorKeyDictionary()

    def find(self, parameters: Sequence[Tensor], x: Tensor) -> Kept | None:
        """What was kept for a bucket of these parameters, whose gradients are ``x``."""
        kept: Kept | None = self._of.get(parameters[0])
        if kept is None or kept.num_parameters != len(parameters):
            return None
        if any(self._of.get(p) is not kept for p in parameters):
            return None
        fits = kept.memory is None or (kept.memory.numel() == x.numel() and kept.memory.dtype == x.dtype)
        return kept if fits else None

    def keep(self, parameters: Sequence[Tensor], memory: Tensor | None) -> None:
        """From now on."""
        kept = Kept(memory, len(parameters))
        for parameter in parameters:
            self._of[parameter] = kept

    def clear(self) -> None:
        """Give all of it back."""
        self._of.clear()
