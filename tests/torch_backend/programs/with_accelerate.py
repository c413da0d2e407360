"""Accelerate. On a CPU it knows gloo alone, and refuses other names; it takes a group that is there."""

import sys

import regression
import torch
from accelerate import Accelerator

torch.distributed.init_process_group(sys.argv[1])
accelerator = Accelerator(cpu=True)
network, rows = regression.network(), regression.rows()
loader = torch.utils.data.DataLoader(rows, regression.ROWS // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(network, regression.adam(network.parameters()), loader)
losses = []
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    losses.append(accelerator.gather(loss.detach()[None]).mean().item())
regression.report(accelerator.process_index, accelerator.num_processes, losses)
torch.distributed.destroy_process_group()
