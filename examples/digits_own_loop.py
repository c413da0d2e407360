"""Digit recognition by a loop of one's own: an optimizer with averaged gradients, or with divided state.

    torchmpirun -n 4 examples/digits_own_loop.py
    torchmpirun -n 4 examples/digits_own_loop.py --sharded --clip 1.0

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
options = parser.parse_args()

if "OMP_NUM_THREADS" not in os.environ:  # the launcher sets it: cores / ranks
    torch.set_num_threads(1)

mpi.start()
torch.manual_seed(options.seed)
train_set, test_set = digits_data.load(options.data)
count = len(train_set) // mpi.size() * mpi.size() if options.sharded else len(train_set)
own = Subset(train_set, range(mpi.rank(), count, mpi.size()))
loader = DataLoader(own, options.batch, shuffle=True, generator=torch.Generator().manual_seed(mpi.rank()))

network = digits_data.conv_net(image_size=train_set.tensors[0].shape[-1])
mpinn.synchronize_parameters(network)
adam = torch.optim.Adam(network.parameters(), lr=options.lr)
compression = COMPRESSIONS[options.compression]()
if options.sharded:
    optimizer = optim.ShardedOptimizer.from_optimizer(adam, compression=compression)
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
    if options.sharded:
        train_epoch()
    else:
        with mpi.join(optimizer):  # some ranks have a batch more
            train_epoch()

mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * digits_data.accuracy(network, test_set):.2f} %")
mpi.stop()
