"""DDP under join(): ranks with fewer inputs than others, gradients divided by the ranks that have some left."""

import pytest
import torch

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("uneven", [True, False])
def test_ddp_joins(group, uneven, by_initial_size):
    rank, size = group.rank(), group.size()
    torch.manual_seed(5)
    net = torch.nn.Linear(3, 1, bias=False)
    model = torch.nn.parallel.DistributedDataParallel(net)
    steps = rank + 1 if uneven else 2
    with model.join(divide_by_initial_world_size=by_initial_size):
        for step in range(steps):
            net.zero_grad()
            model(torch.full((1, 3), float(rank + 1))).sum().backward()
            there = range(step if uneven else 0, size)
            expected = sum(other + 1 for other in there) / (size if by_initial_size else len(there))
            assert net.weight.grad.flatten().tolist() == pytest.approx([expected] * 3)
