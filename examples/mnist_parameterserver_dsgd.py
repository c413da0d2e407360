"""Digit recognition with gradients that are averaged by a parameter server, step by step.

    torchmpirun -n 4 examples/mnist_parameterserver_dsgd.py

This is synchronous SGD written with the low level of the parameter server alone: zero the server, add all ranks'
gradients, receive the sum, divide. It takes the same steps as mnist_allreduce.py, and shows what send, receive and
barrier mean; allreduce does the same faster.
"""

import argparse
import os

import digits_data
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn
from torchmpi_py import paramserver as ps
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="directory of MNIST's idx files; default: scikit-learn's digits")
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--batch", type=int, default=60, help="samples per step, over all ranks; rounded up")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--at-least", type=float, default=0.95, help="the accuracy that must be reached")
options = parser.parse_args()

if "OMP_NUM_THREADS" not in os.environ:  # the launcher sets it: cores / ranks
    torch.set_num_threads(1)

mpi.start()
torch.manual_seed(options.seed)
train_set, test_set = digits_data.load(options.data)
network = digits_data.conv_net(image_size=train_set.tensors[0].shape[-1])
mpinn.synchronize_parameters(network)
server = ps.init(parameters_to_vector(network.parameters()).detach())


def average_gradients(state):
    """Every rank's gradients become their mean."""
    gradients = [p.grad for p in network.parameters()]
    total = parameters_to_vector(gradients)
    if mpi.rank() == 0:
        server.send(total, "zero").wait()
    mpi.barrier()
    server.send(total, "add").wait()
    mpi.barrier()
    server.receive(total).wait()
    mpi.barrier()  # rank 0 is about to zero it, in the next step
    vector_to_parameters(total / mpi.size(), gradients)


engine = SGDEngine()
engine.hooks.on_backward = average_gradients
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
    lr=options.lr,
    maxepoch=options.epochs,
)

mpinn.check_with_allreduce(network)
accuracy = digits_data.accuracy(network, test_set)
if mpi.rank() == 0:
    print(f"parameters are bit-identical on all {mpi.size()} ranks")
    print(f"accuracy {100 * accuracy:.2f} %")
assert accuracy >= options.at_least, f"accuracy {accuracy}, but {options.at_least} was to be reached"
mpi.stop()
