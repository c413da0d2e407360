"""Values that differ at each position and on each rank, small and whole, so that every result is exact."""

import torch


def values(rank, count, dtype=torch.float32, step=0):
    """Return what a rank holds: below 13, so that the sum of several ranks is exact in every dtype."""
    whole = (torch.arange(count) * 7 + rank * 3 + step * 5) % 11 + rank % 3
    if dtype == torch.bool:
        return whole % 3 == 0
    if dtype.is_complex:
        return torch.complex(whole.double(), ((whole + rank) % 3).double()).to(dtype)
    return whole.to(dtype)


def stacked(size, count, dtype=torch.float32, step=0):
    """Return the values of all ranks, one row per rank."""
    return torch.stack([values(rank, count, dtype, step) for rank in range(size)])


def total(size, count, dtype=torch.float32, step=0):
    """Return the sum of the values of all ranks."""
    exact = torch.complex128 if dtype.is_complex else torch.int64
    return stacked(size, count, exact, step).sum(0).to(dtype)
