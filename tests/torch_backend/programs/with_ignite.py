"""Ignite's idist takes a group that is there; its ``auto_model`` wraps only for the backends that it knows by name."""

import sys

import ignite.distributed as idist
import regression
import torch
from ignite.engine import Engine

torch.distributed.init_process_group(sys.argv[1])
network = torch.nn.parallel.DistributedDataParallel(regression.network())
optimizer = idist.auto_optim(regression.adam(network.parameters()))


def step(engine, batch):
    inputs, targets = batch
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(network(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(idist.all_reduce(loss.item()) / idist.get_world_size())


losses = []
loader = idist.auto_dataloader(regression.rows(), batch_size=regression.ROWS, shuffle=False)
Engine(step).run(loader, max_epochs=1)
regression.report(idist.get_rank(), idist.get_world_size(), losses)
