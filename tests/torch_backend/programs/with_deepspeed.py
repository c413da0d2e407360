"""DeepSpeed with sharded optimizer states and gradients, on CPUs."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import regression
import torch

deepspeed.init_distributed(dist_backend=sys.argv[1])
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
network = regression.network().float()
config = {
    "train_micro_batch_size_per_gpu": regression.ROWS // size,
    "zero_optimization": {"stage": int(sys.argv[2]) if len(sys.argv) > 2 else 2},
    "zero_allow_untested_optimizer": True,
}
optimizer = regression.adam(network.parameters())
engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
losses = []
for inputs, targets in regression.loader(rank, size):
    loss = torch.nn.functional.mse_loss(engine(inputs.float()), targets.float())
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    deepspeed.comm.all_reduce(mean)
    losses.append(mean.item() / size)
regression.report(rank, size, losses)
