"""Digit recognition with torch's DistributedDataParallel over MPI.

    torchmpirun -n 2 examples/ddp_digits.py

The ten lines that end in "# ddp" are all that distribution takes: without them this is a script for one process. Alone,
or on a number of ranks that divides the batch, it takes the same steps. --backend gloo goes by torch's own sockets.
"""

import argparse
import itertools
import os

import digits_data
import torch
import torch.distributed as dist  # ddp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from torchmpi_py import torch_backend  # ddp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=60, help="samples per step, over all ranks")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--backend", default="torchmpi")
parser.add_argument("--save", help="folder for the final parameters, a file for each rank")
options = parser.parse_args()

rank, num_ranks = 0, 1
dist.init_process_group(options.backend)  # ddp
rank, num_ranks = dist.get_rank(), dist.get_world_size()  # ddp

torch.manual_seed(options.seed)
train_set, test_set = digits_data.load()
network = model = digits_data.conv_net(image_size=8)
model = DistributedDataParallel(network)  # ddp
if options.backend == "torchmpi":  # ddp
    model.register_comm_hook(None, torch_backend.average)  # ddp
optimizer = torch.optim.SGD(model.parameters(), options.lr)

sampler = RandomSampler(train_set)
sampler = DistributedSampler(train_set, seed=options.seed, drop_last=True)  # ddp
loader = DataLoader(train_set, options.batch // num_ranks, sampler=sampler, drop_last=True)


def batches():
    """Epoch after epoch."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)  # ddp
        yield from loader


for images, labels in itertools.islice(batches(), options.steps):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()

if rank == 0:
    print(f"{num_ranks} ranks: test accuracy {100 * digits_data.accuracy(network, test_set):.2f} %")
if options.save:
    os.makedirs(options.save, exist_ok=True)
    torch.save(network.state_dict(), f"{options.save}/rank-{rank}.pt")
dist.destroy_process_group()  # ddp
