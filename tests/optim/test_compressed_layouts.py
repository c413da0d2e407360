"""Compressed gradients of parameters in every layout: a gradient of rank 2 arrives whole, whatever its strides."""

import pytest
import torch
import torch.distributed as dist

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.optim import compression

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

LAYOUTS = {
    "row-major": torch.zeros(12, 10),
    "transposed": torch.zeros(10, 12).t(),
    "vector": torch.zeros(7),
    "channels_last": torch.zeros(8, 6, 3, 5).to(memory_format=torch.channels_last),
    "columns first": torch.zeros(6, 8, 3, 5).transpose(0, 1),
    "reversed": torch.zeros(3, 4, 10).permute(2, 1, 0),
    "gaps": torch.zeros(12, 20)[:, ::2],
}
COMPRESSIONS = {
    "BF16": (compression.BF16, 2**-7),
    "FP16": (compression.FP16, 2**-10),
    "TopK": (lambda: compression.TopK(1.0), 1e-6),
    "PowerSGD": (lambda: compression.PowerSGD(2), 1e-3),  # it orthogonalizes in float32
}


def parameters():
    return torch.nn.ParameterList([torch.nn.Parameter(x.clone()) for x in LAYOUTS.values()])


def of_rank_2(x, seed):
    """The same on all ranks: as a matrix of ``len(x)`` rows it has rank 2."""
    generator = torch.Generator().manual_seed(seed)
    columns = x[0].numel() if x.dim() > 1 else 1
    a, b = torch.randn(len(x), 2, generator=generator), torch.randn(2, columns, generator=generator)
    return (a @ b).view(x.shape)


def sgd(module):
    return torch.optim.SGD(module.parameters(), 1.0)


def sharded(module, compression, placement):
    return optim.ShardedOptimizer(
        module.parameters(), torch.optim.SGD, lr=1.0, compression=compression, placement=placement
    )


def registered(module, compression):
    optimizer, reduction = sgd(module), mpinn.register_async_backward(module, compression=compression)
    optimizer.register_step_pre_hook(lambda *_: reduction.synchronize())
    optimizer.remove = reduction.remove
    return optimizer


def in_ddp(module, made):
    from torchmpi_py import torch_backend

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = module

        def forward(self, gradients):
            return sum((p * x).sum() for p, x in zip(self.parts, gradients, strict=True))

    optimizer, ddp = sgd(module), torch.nn.parallel.DistributedDataParallel(Sum())
    ddp.register_comm_hook(None, torch_backend.compressed(made))
    optimizer.loss, optimizer.remove = ddp, lambda: None
    return optimizer


@pytest.fixture(scope="module")
def group(mpi):
    import torchmpi_py.torch_backend  # noqa: F401

    dist.init_process_group("torchmpi")
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "ddp": in_ddp,
    "register": registered,
    "distributed": lambda module, made: optim.DistributedOptimizer(sgd(module), module, compression=made),
    "slices": lambda module, made: sharded(module, made, "size"),
    "owners": lambda module, made: sharded(module, made, "round_robin"),
}


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_arrive_whole(mpi, group, wrapper, name):
    make, tolerance = COMPRESSIONS[name]
    module = parameters()
    layouts = [p.stride() for p in module]
    optimizer = WRAPPERS[wrapper](module, make())
    for step in range(2):
        before = [p.detach().clone() for p in module]
        optimizer.zero_grad()
        gradients = [of_rank_2(p, 10 * step + number) for number, p in enumerate(module)]
        shares = [(mpi.rank() + 1) * x for x in gradients]
        loss = getattr(optimizer, "loss", lambda xs: sum((p * x).sum() for p, x in zip(module, xs, strict=True)))
        loss(shares).backward()
        optimizer.step()
        for layout, p, old, x in zip(LAYOUTS, module, before, gradients, strict=True):
            exact = x * (mpi.size() + 1) / 2
            error = ((old - p.detach()) - exact).abs().max() / exact.abs().max()
            assert error <= mpi.size() * tolerance, (layout, step)
    optimizer.remove()
    mpinn.check_with_allreduce(module)
    assert [p.stride() for p in module][:-1] == layouts[:-1]  # the last one has gaps, which a bucket closes


def test_other_strides_on_other_ranks(mpi):
    """The parts of a bucket lie in the order of the strides: other ones would be added to each other's elements."""
    if mpi.size() == 1:
        pytest.skip("one rank agrees with itself")
    from torchmpi_py import errors

    module = torch.nn.Linear(4, 3)
    if mpi.rank() == 1:
        module.weight.data = module.weight.data.t().contiguous().t()
    for make in (
        lambda: mpinn.register_async_backward(module),
        lambda: optim.DistributedOptimizer(sgd(module), module),
        lambda: mpinn.synchronize_gradients(module),
        lambda: sharded(module, None, "size").step(),
    ):
        with pytest.raises(errors.RanksDisagree, match=r"weight.*strides \[1, 3\]|'0'.*strides \[1, 3\]"):
            make()
