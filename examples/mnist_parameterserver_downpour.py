"""Digit recognition with Downpour SGD: every rank trains alone, and streams its gradients to a parameter server.

    torchmpirun -n 4 examples/mnist_parameterserver_downpour.py

No rank waits for another one. Every --send-frequency steps a rank sends the sum of its gradients, times a learning
rate, and every --update-frequency steps it takes the server's parameters for its own; they were fetched --prefetch
steps before, while it went on. Runs are not reproducible to the bit: who comes when is chance.
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
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.9, help="Nesterov's, of each rank alone")
parser.add_argument("--init-delay", type=int, default=20, help="steps before the server is seeded")
parser.add_argument("--update-frequency", type=int, default=10, help="steps between the server's parameters")
parser.add_argument("--send-frequency", type=int, default=5, help="steps between sends")
parser.add_argument("--prefetch", type=int, default=2, help="steps by which parameters are fetched early")
parser.add_argument("--at-least", type=float, default=0.95, help="the accuracy that must be reached")
options = parser.parse_args()

if "OMP_NUM_THREADS" not in os.environ:  # the launcher sets it: cores / ranks
    torch.set_num_threads(1)

mpi.start()
torch.manual_seed(options.seed)
train_set, test_set = digits_data.load(options.data)
network = digits_data.conv_net(image_size=train_set.tensors[0].shape[-1])
mpinn.synchronize_parameters(network)

# What momentum makes of a gradient over time is lr / (1 - momentum) of it, and all ranks together send one such step.
rate = options.lr / (1 - options.momentum) / mpi.size()
update = ps.DownpourUpdate(
    network,
    local_update=lambda gradients: gradients.mul_(-rate),
    init_delay=options.init_delay,
    update_frequency=options.update_frequency,
    send_frequency=options.send_frequency,
    prefetch=options.prefetch,
)

engine = SGDEngine()
engine.hooks.on_update = lambda state: update.update(state.t - 1)  # state.t counts this step already
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
    optimizer=lambda parameters: torch.optim.SGD(
        parameters, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0
    ),
    maxepoch=options.epochs,
)

# The result is what the server holds when all ranks are done.
update.take_result()

mpinn.check_with_allreduce(network)
accuracy = digits_data.accuracy(network, test_set)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % with the server's parameters")
assert accuracy >= options.at_least, f"accuracy {accuracy}, but {options.at_least} was to be reached"
mpi.stop()
