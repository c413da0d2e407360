"""A hybrid network: what all ranks have learns through a parameter server, split layers by their replicas."""

import pytest
import torch
from support import networks

from torchmpi_py import nn as mpinn
from torchmpi_py.paramserver import SynchronousUpdate

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def layers():
    torch.manual_seed(2)
    below = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.Tanh(), torch.nn.Flatten())
    return below, [torch.nn.Linear(27, 13), torch.nn.Tanh(), torch.nn.Linear(13, 4)]


def test_convolutions_through_a_server_and_split_linear_layers(mpi):
    """Four steps are those of one process, in groups of two ranks where there are as many, else over all."""
    loss_of = torch.nn.functional.cross_entropy
    below, head = layers()
    plain = torch.nn.Sequential(*layers()[0], *layers()[1])
    optimizer = torch.optim.SGD(plain.parameters(), 0.2)
    with mpi.split(mpi.rank() // 2 if mpi.size() % 2 == 0 else 0) as group:
        head[0] = mpinn.ColumnParallelLinear.from_linear(head[0], comm=group, gather_output=False)
        head[2] = mpinn.RowParallelLinear.from_linear(head[2], comm=group, input_is_split=True)
        top = mpinn.ModelParallel(*head, comm=group)
        server = SynchronousUpdate(below, optimizer="sgd", lr=0.2)
        of_top = torch.optim.SGD(top.parameters(), 0.2)
        for step in range(4):
            images = networks.batch(mpi.size(), 4, 1, 5, 5, step=step)
            labels = networks.batch(mpi.size(), 4, 4, rank=1, step=step).argmax(-1)
            for module in (below, top, plain):
                module.zero_grad()
            loss_of(top(below(images[mpi.rank()])), labels[mpi.rank()]).backward()
            mpinn.synchronize_gradients(top)
            of_top.step()
            server.update()
            loss_of(plain(images.flatten(0, 1)), labels.flatten()).backward()
            optimizer.step()
        ours = [*below.state_dict().values(), *top.state_dict().values()]
        torch.testing.assert_close(ours, [*plain.state_dict().values()], rtol=1e-5, atol=1e-6)
        server.free()
