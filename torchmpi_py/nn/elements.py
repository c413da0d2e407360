"""Indices of the largest elements of a tensor, its maximum norm, and a finiteness check."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SAMPLE = 65536  # smallest number of elements in a sample


def is_finite(x: Tensor) -> bool:
    """Return whether all elements are finite, in one pass over the tensor."""
    return math.isfinite(largest_amount(torch.view_as_real(x) if x.is_complex() else x))


def largest_amount(x: Tensor) -> float:
    """Return the maximum norm, or NaN if an element is NaN. On the CPU, ``vector_norm`` would be 17 times slower."""
    if not x.numel():
        return 0.0
    ends = torch.aminmax(x)
    return float(torch.maximum(-ends.min, ends.max))


def indices_of_largest(x: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest elements, in any order; NaN counts as the largest.

    ``topk`` is slow, so a sample first provides a threshold, and ``topk`` searches only elements at or above it.
    """
    step = x.numel() // _SAMPLE
    if step > 1:
        sample = x[::step]
        expected = count * sample.numel() // x.numel()
        threshold = torch.topk(sample, min(sample.numel(), expected + expected // 4 + 16), sorted=False).values.min()
        candidates = (x < threshold).logical_not_().nonzero().view(-1)
        if candidates.numel() >= count:
            return candidates[torch.topk(x[candidates], count, sorted=False).indices]
    return torch.topk(x, count, sorted=False).indices
