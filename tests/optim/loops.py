"""Loops of users: each rank trains on batches of its own, and one process alone on those of all ranks."""

import copy

import torch
from support import networks
from torch.nn.functional import mse_loss

from torchmpi_py.optim import compression

ROWS = 4
COMPRESSIONS = {
    "BF16": compression.BF16,
    "FP16": compression.FP16,
    "TopK": lambda: compression.TopK(0.2),
    "PowerSGD": lambda: compression.PowerSGD(2),
}


def pair(*sizes, dtype=torch.float64):
    """Return a network, and a copy that one process trains alone."""
    module = networks.perceptron(*(sizes or (6, 9, 2)), dtype=dtype)
    return module, copy.deepcopy(module)


def loss_of(module, step, ranks):
    """Return the mean loss of the batches that these ranks have in a step."""
    weight, *_, bias = module.parameters()
    x, y = (
        torch.cat([networks.batch(ROWS, width, rank=rank + first, step=step, dtype=weight.dtype) for rank in ranks])
        for width, first in ((weight.shape[1], 0), (len(bias), 500))
    )
    return mse_loss(module(x), y)


def train(module, optimizer, steps, ranks, passes=1):
    """Take some steps, each after so many backward passes, whose losses are added up."""
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            loss_of(module, passes * step + part, ranks).backward()
        optimizer.step()


def sides(mpi, module, ours, alone, theirs):
    """Return what a loop is run with on this rank, and on one process: module, optimizer, ranks."""
    return (module, ours, [mpi.rank()]), (alone, theirs, range(mpi.size()))


def assert_close(module, other, rtol=1e-9, atol=1e-9):
    torch.testing.assert_close(networks.flat(module), networks.flat(other), rtol=rtol, atol=atol)
