"""Compressed gradients in every wrapper, of parameters in every layout: in the end they arrive whole."""

import pytest
import torch
import torch.distributed as dist
from support import networks

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.errors import RanksDisagree
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
COMPRESSIONS = {  # with the size of gradients and the tolerance
    "BF16": (compression.BF16, 1.0, 2**-7),
    "FP16 of large ones": (compression.FP16, 1e8, 2**-10),  # outside the range of float16
    "FP16 of small ones": (compression.FP16, 1e-8, 2**-10),
    "TopK": (lambda: compression.TopK(0.25), 1.0, 1e-5),
    "PowerSGD": (lambda: compression.PowerSGD(5), 1.0, 1e-3),  # it orthogonalizes in float32
}


def sgd(module):
    return torch.optim.SGD(module.parameters(), 1.0)


def sharded(module, compression, placement):
    return optim.ShardedOptimizer(
        module.parameters(), torch.optim.SGD, lr=1.0, compression=compression, placement=placement
    )


def in_ddp(module, made):
    from torchmpi_py import torch_backend

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = module

        def forward(self, gradients):
            return loss_of(self.parts, gradients)

    optimizer, ddp = sgd(module), torch.nn.parallel.DistributedDataParallel(Sum())
    ddp.register_comm_hook(None, torch_backend.compressed(made))
    optimizer.loss = ddp
    return optimizer


def loss_of(module, gradients):
    return sum((p * x).sum() for p, x in zip(module, gradients, strict=True))


@pytest.fixture(scope="module")
def group(mpi):
    import torchmpi_py.torch_backend  # noqa: F401

    dist.init_process_group("torchmpi")
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "ddp": in_ddp,
    "distributed": lambda module, made: optim.DistributedOptimizer(sgd(module), module, compression=made),
    "slices": lambda module, made: sharded(module, made, "size"),
    "owners": lambda module, made: sharded(module, made, "round_robin"),
}


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_arrive_whole(mpi, group, wrapper, name):
    """What is left out of a step comes in the next ones, in which gradients are zero."""
    make, size, tolerance = COMPRESSIONS[name]
    module = torch.nn.ParameterList([torch.nn.Parameter(x.clone()) for x in LAYOUTS.values()])
    layouts = [p.stride() for p in module]
    optimizer = WRAPPERS[wrapper](module, make())
    exact = [torch.zeros_like(p) for p in module]
    first = wrapper == "ddp"  # which arranges other buckets after a step, and what is left out until then is lost
    for step in range(8 if name in ("TopK", "PowerSGD") else 3):
        optimizer.zero_grad()
        scale = size * (first <= step < first + 2)
        every_rank = [
            [networks.batch(*p.shape, rank=10 * rank + n, step=step) * scale for n, p in enumerate(module)]
            for rank in range(mpi.size())
        ]
        getattr(optimizer, "loss", lambda xs: loss_of(module, xs))(every_rank[mpi.rank()]).backward()
        optimizer.step()
        for total, *shares in zip(exact, *every_rank, strict=True):
            total += sum(shares) / mpi.size()
    for layout, p, total in zip(LAYOUTS, module, exact, strict=True):
        assert (p.detach() + total).abs().max() <= mpi.size() * tolerance * total.abs().max(), layout
    mpinn.check_with_allreduce(module)
    assert [p.stride() for p in module][:-1] == layouts[:-1]  # the last one has gaps, which a bucket closes


@pytest.mark.mpi(min_size=2)
def test_other_strides_on_other_ranks(mpi):
    """The parts of a bucket lie in the order of the strides: other ones would be added to each other's elements."""
    module = torch.nn.Linear(4, 3)
    if mpi.rank() == 1:
        module.weight.data = module.weight.data.t().contiguous().t()
    for make in (
        lambda: mpinn.register_async_backward(module),
        lambda: optim.DistributedOptimizer(sgd(module), module),
        lambda: mpinn.synchronize_gradients(module),
        lambda: sharded(module, None, "size").step(),
    ):
        with pytest.raises(RanksDisagree, match=r"weight.*strides \[1, 3\]|parameter 0.*strides \[1, 3\]"):
            make()
