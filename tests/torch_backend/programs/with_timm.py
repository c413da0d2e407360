"""What timm's train.py does with its arguments before it trains."""

import sys
import types

import regression
import timm.utils
import torch

args = types.SimpleNamespace(device="cpu", dist_backend=sys.argv[1])
device = timm.utils.init_distributed_device(args)
network = regression.network().to(device)
model = torch.nn.parallel.DistributedDataParallel(network) if args.distributed else network
optimizer, losses = regression.adam(model.parameters()), []
for inputs, targets in regression.loader(args.rank, args.world_size):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(timm.utils.reduce_tensor(loss.detach(), args.world_size).item())
regression.report(args.rank, args.world_size, losses)
