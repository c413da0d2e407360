"""Distributed tensors: every way from one placement to another, and layers that are split over the ranks."""

import itertools

import pytest
import regression
import torch
import torch.distributed as dist

from torchmpi_py import nn as mpinn, paramserver as ps

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def mesh(mpi, group):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (mpi.size(),))


def counting(*shape, dtype=torch.float64):
    return (torch.arange(1, 1 + torch.Size(shape).numel()) % 89).view(shape).to(dtype)


@pytest.mark.parametrize("shape", [(7, 5), (8, 4, 3), (3, 1), (1, 6), (2, 0)], ids=str)
def test_redistribute(mpi, mesh, shape):
    """Sizes that divide, that leave some ranks with less, and with nothing."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = counting(*shape, dtype={(7, 5): torch.float32, (8, 4, 3): torch.bfloat16}.get(shape, torch.int64))
    placements = [Replicate()] + [Shard(dim) for dim in range(len(shape))]
    for before, after in itertools.product(placements, repeat=2):
        x = distribute_tensor(whole + mpi.rank(), mesh, [before])  # what rank 0 has counts
        x = x.redistribute(placements=[after])
        expected = whole
        if isinstance(after, Shard):
            parts = whole.chunk(mpi.size(), after.dim)
            expected = parts[mpi.rank()] if mpi.rank() < len(parts) else whole.narrow(after.dim, 0, 0)
        assert torch.equal(x.to_local(), expected), (before, after)
        assert torch.equal(x.full_tensor(), whole), (before, after)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_partial_results_are_reduced(mpi, mesh, op):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mine = counting(7, 5) * (1 + mpi.rank())
    factors = torch.arange(1.0, 1 + mpi.size(), dtype=torch.float64)
    factor = {"sum": factors.sum(), "avg": factors.mean(), "max": factors.max(), "min": factors.min()}[op]
    for after in (Replicate(), Shard(0), Shard(1)):
        x = DTensor.from_local(mine, mesh, [Partial(op)]).redistribute(placements=[after])
        torch.testing.assert_close(x.full_tensor(), counting(7, 5) * factor, rtol=1e-15, atol=0)


def clip(parameters, max_norm):
    """``torch.nn.utils.clip_grad_norm_``, which refuses distributed and plain gradients in one call."""
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    parameters = list(parameters)
    norms = [
        get_total_norm([p.grad for p in parameters if isinstance(p, DTensor) == is_distributed])
        for is_distributed in (True, False)
    ]
    clip_grads_with_norm_(parameters, max_norm, torch.hypot(norms[0].full_tensor(), norms[1]), foreach=False)


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_layers_train_as_one_process(mpi, mesh, sequence):
    """Columns of the first layer, rows of the next; with ``sequence`` each rank brings a share of the samples."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    outside = {"input_layouts": Shard(0)} if sequence else {}
    plan = {"0": ColwiseParallel(**outside), "2": RowwiseParallel()}
    model = parallelize_module(regression.network(width=60), mesh, plan)
    optimizer = regression.adam(model.parameters())
    for step in range(regression.STEPS):
        inputs, targets = regression.batch(step)
        optimizer.zero_grad()
        mine = inputs.chunk(mpi.size())[mpi.rank()] if sequence else inputs
        torch.nn.functional.mse_loss(model(mine), targets).backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
    regression.assert_equal(model.state_dict(), regression.trained_alone(width=60, max_norm=0.5))


def test_distributed_tensors_where_plain_ones_are_wanted(mpi, rank, size, mesh):
    """Verbs, checks, parameter servers, torch.distributed: a TypeError with the remedy, on all ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    module = torch.nn.Linear(3, size)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    server, served = ps.init(torch.zeros(size)), ps.init_tensors([torch.zeros(size)])
    x, ones = distribute_tensor(torch.ones(size), mesh, [Shard(0)]), [1] * size
    plain, plains, many = torch.ones(size), [torch.ones(size) for _ in range(size)], [x] * size
    verbs = (mpi.allreduce, mpi.allreduce_async, mpi.allgather, mpi.broadcast, mpi.check_with_allreduce)
    modules = (mpinn.synchronize_parameters, mpinn.check_with_allreduce, mpinn.synchronize_gradients)
    for call, *args in (
        *((verb, y) for verb in verbs for y in (x, module.bias)),
        *((call, x) for call in (ps.init, server.send, server.receive)),
        (ps.init_tensors, [x]),
        (ps.send_tensors, served, [x]),
        *((call, x, 0) for call in (dist.broadcast, dist.reduce)),
        (dist.all_reduce, x),
        (dist.all_gather, plains, x),
        (dist.all_gather, many, plain),
        (dist.reduce_scatter, plain, many),
        (dist.all_to_all, plains, many),
        (dist.all_to_all, many, plains),
        (dist.all_to_all_single, plain, x, ones, ones),
        *((call, x, plains if rank == 0 else None, 0) for call in (dist.gather, dist.scatter)),
        *((call, x, rank) for call in (dist.isend, dist.irecv)),
        *((call, module) for call in (*modules, mpinn.register_async_backward)),
    ):
        with pytest.raises(TypeError, match=r"is a DTensor.*(\.to_local\(\)|examples/mnist_hybrid\.py)"):
            call(*args)
    assert mpi.allreduce(1) == size
    server.free()
    served.free()
