"""What every rank gives, and what comes of it, exactly: small whole numbers that depend on place, rank and call."""

import functools
import threading

import torch

PERIOD = 8191
LARGEST = 31  # the sum over five ranks is exact in every dtype
AVERAGED = 60  # averages over up to five ranks are whole numbers
_lock = threading.Lock()


@functools.cache
def _base():
    return torch.randint(0, LARGEST + 1, (PERIOD,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


_tiled = torch.empty(0, dtype=torch.uint8)


def _bytes(rank, number, count):
    global _tiled
    with _lock:
        if len(_tiled) < count + PERIOD:
            _tiled = _base().repeat(2 + (count + PERIOD) // PERIOD)
        tiled = _tiled
    begin = (rank * 613 + number * 2711) % PERIOD
    return tiled[begin : begin + count]


def given(rank, number, count, dtype=torch.float32, op="sum"):
    """What a rank brings to a call."""
    x = _bytes(rank, number, count).to(dtype, copy=True)
    return x.mul_(AVERAGED) if op == "avg" else x


def reduced(ranks, number, count, dtype=torch.float32, op="sum"):
    """The reduction over ``ranks``, a number of them."""
    total = _bytes(0, number, count).clone()
    for rank in range(1, ranks):
        other = _bytes(rank, number, count)
        if op in ("max", "min"):
            total = getattr(torch, f"{op}imum")(total, other)
        else:
            total.add_(other)
    result = total.to(dtype)
    return result.mul_(AVERAGED).div_(ranks) if op == "avg" else result


def difference(got, expected):
    """In what they differ; "" if they do not."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(got, expected):
        return ""
    wrong = (got != expected).nonzero().flatten()
    first = int(wrong[0])
    return f"{len(wrong)} of {got.numel()} wrong, first [{first}]: {got[first]} instead of {expected[first]}"
