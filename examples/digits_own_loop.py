"""Digit recognition by a loop of one's own: averaged gradients, divided state, or parameters averaged now and then.

    torchmpirun -n 4 examples/digits_own_loop.py
    torchmpirun -n 4 examples/digits_own_loop.py --sharded --clip 1.0
    torchmpirun -n 4 examples/digits_own_loop.py --local-steps 8
    torchmpirun -n 4 examples/digits_own_loop.py --gossip ring

Every rank has the samples whose number leaves its rank as the remainder: some have one batch more, and nobody waits.
"""

import argparse
import os

import digits_data
import torch
from torch.utils.data import DataLoader, Subset

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn
from torchmpi_py import optim

COMPRESSIONS = {
    "none": lambda: None,
    "bf16": optim.compression.BF16,
    "fp16": optim.compression.FP16,
    "topk": lambda: optim.compression.TopK(0.05),
    "randomk": lambda: optim.compression.RandomK(0.25),
    "powersgd": lambda: optim.compression.PowerSGD(2),
}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="directory of MNIST's idx files; default: scikit-learn's digits")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--batch", type=int, default=15, help="samples per step and rank")
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--clip", type=float, help="largest norm of the gradients")
parser.add_argument("--compression", choices=COMPRESSIONS, default="none")
parser.add_argument("--sharded", action="store_true", help="divide Adam's state among the ranks")
parser.add_argument("--local-steps", type=int, help="steps of each rank's own between averages of parameters")
parser.add_argument("--gossip", choices=["ring", "random"], help="average parameters with partners, after each step")
options = parser.parse_args()

if "OMP_NUM_THREADS" not in os.environ:  # the launcher sets it: cores / ranks
    torch.set_num_threads(1)

mpi.start()
torch.manual_seed(options.seed)
train_set, test_set = digits_data.load(options.data)
averages = not (options.sharded or options.local_steps or options.gossip)
count = len(train_set) if averages else len(train_set) // mpi.size() * mpi.size()
own = Subset(train_set, range(mpi.rank(), count, mpi.size()))
loader = DataLoader(own, options.batch, shuffle=True, generator=torch.Generator().manual_seed(mpi.rank()))

network = digits_data.conv_net(image_size=train_set.tensors[0].shape[-1])
mpinn.synchronize_parameters(network)
adam = torch.optim.Adam(network.parameters(), lr=options.lr)
compression = COMPRESSIONS[options.compression]()
if options.sharded:
    optimizer = optim.ShardedOptimizer.from_optimizer(adam, compression=compression)
elif options.local_steps:
    optimizer = optim.LocalSGD(adam, options.local_steps)
elif options.gossip:
    optimizer = optim.Gossip(adam, options.gossip)
else:
    optimizer = optim.DistributedOptimizer(adam, network, compression=compression)


def train_epoch():
    """One pass over this rank's samples."""
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        if options.clip and options.sharded:
            optimizer.clip_grad_norm_(options.clip)
        elif options.clip:
            torch.nn.utils.clip_grad_norm_(network.parameters(), options.clip)
        optimizer.step()


for _ in range(options.epochs):
    if averages:
        with mpi.join(optimizer):  # some ranks have a batch more
            train_epoch()
    else:
        train_epoch()
if options.local_steps or options.gossip:
    optimizer.average()

mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * digits_data.accuracy(network, test_set):.2f} %")
mpi.stop()
