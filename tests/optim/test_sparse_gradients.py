"""Sparse gradients with DistributedOptimizer: of rows that other ranks do not look up, or look up as well."""

import copy

import pytest
import torch
from loops import assert_close

from torchmpi_py import nn as mpinn
from torchmpi_py.optim import DistributedOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def embedding(*shape, sparse=True, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.nn.Embedding(*shape, sparse=sparse, dtype=dtype)


def sgd(module, lr=1.0):
    return torch.optim.SGD(module.parameters(), lr)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch's Adagrad
@pytest.mark.parametrize(
    ("make", "as_dense", "num_passes"),
    [
        (torch.optim.SGD, False, 2),
        (torch.optim.Adagrad, False, 1),
        (torch.optim.Adagrad, True, 2),
        (torch.optim.SparseAdam, False, 2),
    ],
)
def test_they_train_as_on_one_process(mpi, make, as_dense, num_passes):
    """Ranks look up other rows; some rows are looked up by none. The weight of the second layer is used twice."""
    module = torch.nn.ModuleList([embedding(11, 3), embedding(5, 3)])
    alone = copy.deepcopy(module)
    for each in alone:
        each.sparse = make is torch.optim.SparseAdam
    ours = DistributedOptimizer(
        make(module.parameters(), 0.1), module, sparse_as_dense=as_dense, backward_passes_per_step=num_passes
    )
    theirs = make(alone.parameters(), 0.1)
    for step in range(3):
        for part in range(num_passes):
            rows = [torch.tensor([(rank + step + part) % 7, rank % 3]) for rank in range(mpi.size())]
            for m, indices, scale in ((module, rows[mpi.rank()], 1), (alone, torch.cat(rows), mpi.size())):
                loss = (m[0](indices) ** 2).sum() + (m[1](indices % 5) * m[1](indices % 2)).sum()
                loss.div(scale).backward()
        assert all(p.grad.is_sparse != as_dense for p in module.parameters())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    assert_close(module, alone)
    mpinn.check_with_allreduce(module)


def test_where_a_rank_has_none(mpi):
    """Its rows count as zero; with join the mean is over the ranks that have data."""
    module = embedding(6, 2)
    before = module.weight.detach().clone()
    ours = DistributedOptimizer(sgd(module), module)
    if mpi.rank() == 0:
        module(torch.tensor([2])).sum().backward()
    ours.step()
    expected = torch.zeros_like(before)
    expected[2] = 1 / mpi.size()
    torch.testing.assert_close(before - module.weight, expected)
    with mpi.join(ours):
        for _ in range(1 + (mpi.rank() == 0)):
            ours.zero_grad()
            module(torch.tensor([mpi.rank()])).sum().backward()
            ours.step()
    expected[: mpi.size()] += 1 / mpi.size()
    expected[0] += 1
    torch.testing.assert_close(before - module.weight, expected)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_weight_that_is_an_output_layer_too(mpi, make):
    """Its gradient is dense, as in torch; sparse in a step without the output layer, which SGD alone can take."""
    module, alone = embedding(6, 2), embedding(6, 2, sparse=False)
    ours = DistributedOptimizer(make(module.parameters(), 0.1), module)
    theirs = make(alone.parameters(), 0.1)
    for step in range(4):
        for m, ranks, optimizer in ((module, [mpi.rank()], ours), (alone, range(mpi.size()), theirs)):
            optimizer.zero_grad()
            x = m(torch.tensor([rank + step % 2 for rank in ranks]))
            (x if step == 2 and make is torch.optim.SGD else x @ m.weight.T).pow(2).sum().div(len(ranks)).backward()
            optimizer.step()
    assert_close(module, alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_those_of_16_bits_are_added_in_float32(mpi, dtype):
    """No overflow where the mean has none, and no digits lost but in the result."""
    module = embedding(4, 2, dtype=dtype)
    ours = DistributedOptimizer(sgd(module), module)
    largest = 40000.0 if dtype == torch.float16 else 1.0
    for share, mean in ((largest, largest), (1 + mpi.rank() * 2.0**-7, 1 + (mpi.size() - 1) / 2 * 2.0**-7)):
        ours.zero_grad()
        (module(torch.tensor([1])) * torch.tensor(share, dtype=dtype)).sum().backward()
        assert module.weight.grad.dtype == dtype
        assert module.weight.grad.to_dense()[1].tolist() == [torch.tensor(mean).to(dtype).item()] * 2


@pytest.mark.parametrize("as_dense", [False, True])
def test_those_that_were_there_before(mpi, as_dense):
    """Of a backward pass before the optimizer was made."""
    module = embedding(5, 2)
    module(torch.tensor([mpi.rank() % 5])).sum().backward()
    before = module.weight.detach().clone()
    DistributedOptimizer(sgd(module), module, sparse_as_dense=as_dense).step()
    torch.testing.assert_close((before - module.weight).sum().item(), 2.0)
