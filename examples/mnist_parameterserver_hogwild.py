"""Digit recognition with Hogwild: the ranks of a node train one copy of the weights, without locks.

    torchmpirun -n 4 examples/mnist_parameterserver_hogwild.py

The weights lie in memory that all ranks share, and every rank's optimizer changes them in place, whatever the others
do. Nothing is sent, and nobody waits. Runs are not reproducible to the bit: who comes when is chance.
"""

import argparse
import os

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn
from torchmpi_py import paramserver as ps
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="directory of MNIST's idx files; default: scikit-learn's digits")
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--batch", type=int, default=60, help="samples per step, over all ranks; rounded up")
parser.add_argument("--lr", type=float, default=0.1, help="divided by the number of ranks")
parser.add_argument("--at-least", type=float, default=0.95, help="the accuracy that must be reached")
options = parser.parse_args()

if "OMP_NUM_THREADS" not in os.environ:  # the launcher sets it: cores / ranks
    torch.set_num_threads(1)

mpi.start()
torch.manual_seed(options.seed)
train_set, test_set = digits_data.load(options.data)
network = digits_data.conv_net(image_size=train_set.tensors[0].shape[-1])

hogwild = ps.Hogwild(network)  # rank 0's values, on all ranks

engine = SGDEngine()
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
    lr=options.lr / mpi.size(),  # with n ranks there are n times as many steps
    maxepoch=options.epochs,
)
mpi.barrier()

mpinn.check_with_allreduce(network)
bias = network[-1].bias.detach()
if mpi.rank() == mpi.size() - 1:
    bias += 1  # which all ranks see, and which changes no decision
mpi.barrier()
mpinn.check_with_allreduce(network)
accuracy = digits_data.accuracy(network, test_set)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % with the weights that all ranks share")
assert accuracy >= options.at_least, f"accuracy {accuracy}, but {options.at_least} was to be reached"
mpi.stop()
