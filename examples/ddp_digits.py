"""Digit recognition with torch's DistributedDataParallel over MPI.

    torchmpirun -n 2 examples/ddp_digits.py
    2 ranks: test accuracy 98.06 %

The ten lines that end in "# ddp" are all that distribution takes: without them this is a script for one process. Alone,
or on a number of ranks that divides the batch, it takes the same steps. --backend gloo goes by torch's own sockets.
"""

import os

import digits_data
import torch
import torch.distributed as dist  # ddp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from torchmpi_py import torch_backend  # ddp

parser = digits_data.parser(__doc__)
parser.add_argument("--backend", default="torchmpi")
parser.add_argument("--save", help="folder for the final parameters, a file for each rank")
options = parser.parse_args()

rank, num_ranks = 0, 1
dist.init_process_group(options.backend)  # ddp
rank, num_ranks = dist.get_rank(), dist.get_world_size()  # ddp

train_set, test_set, network = digits_data.prepare(options)
model = network
model = DistributedDataParallel(network)  # ddp
if options.backend == "torchmpi":  # ddp
    model.register_comm_hook(None, torch_backend.average)  # ddp
optimizer = torch.optim.SGD(model.parameters(), options.lr)

sampler = RandomSampler(train_set)
sampler = DistributedSampler(train_set, seed=options.seed, drop_last=True)  # ddp
loader = DataLoader(train_set, options.batch // num_ranks, sampler=sampler, drop_last=True)

curve = digits_data.Curve(options, network, test_set)
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)  # ddp
    for images, labels in curve.steps(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

accuracy = curve.end()
if rank == 0:
    print(f"{num_ranks} ranks: test accuracy {100 * accuracy:.2f} %")
if options.save:
    os.makedirs(options.save, exist_ok=True)
    torch.save(network.state_dict(), f"{options.save}/rank-{rank}.pt")
dist.destroy_process_group()  # ddp
