"""Digit recognition with bounded staleness (SSP): ranks run ahead of each other, but not further than agreed.

    torchmpirun -n 4 examples/mnist_parameterserver_ssp.py --staleness 3 --slow 0.01

In every step a rank adds to a parameter server what its optimizer has changed. The fastest rank may be --staleness
steps ahead of the slowest one, then it waits. With --staleness 0 this is synchronous training. --slow makes the last
rank sleep in every step, to see the bound at work.
"""

import argparse
import os
import time

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
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--staleness", type=int, default=3, help="steps that the fastest may be ahead of the slowest")
parser.add_argument("--init-delay", type=int, default=0, help="steps before the server is seeded")
parser.add_argument("--slow", type=float, default=0.0, help="seconds that the last rank sleeps in every step")
parser.add_argument("--at-least", type=float, default=0.95, help="the accuracy that must be reached")
options = parser.parse_args()

if "OMP_NUM_THREADS" not in os.environ:  # the launcher sets it: cores / ranks
    torch.set_num_threads(1)

mpi.start()
torch.manual_seed(options.seed)
train_set, test_set = digits_data.load(options.data)
network = digits_data.conv_net(image_size=train_set.tensors[0].shape[-1])
mpinn.synchronize_parameters(network)

update = ps.StaleSynchronousUpdate(network, staleness=options.staleness, init_delay=options.init_delay)

# Who has completed how many steps since the server was seeded: a small server with a number for each rank, to watch the
# bound from outside.
steps = ps.init(torch.zeros(mpi.size(), dtype=torch.int64))
own_step = torch.zeros(mpi.size(), dtype=torch.int64)
own_step[mpi.rank()] = 1
largest_lead = 0


def advance(state):
    """Count the step, wait until the next one may begin, and look how far ahead this rank is then."""
    global largest_lead
    step = state.t - 1  # state.t counts this one already
    if mpi.rank() == mpi.size() - 1:
        time.sleep(options.slow)
    if step > options.init_delay:  # before, every rank trains alone
        steps.send(own_step, "add")  # comes before what the update sends
    update.update(step)
    completed = steps.receive().wait()
    largest_lead = max(largest_lead, int(completed[mpi.rank()] - completed.min()))


engine = SGDEngine()
engine.hooks.on_update = advance
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
    lr=options.lr,
    maxepoch=options.epochs,
)

# The result is what the server holds when all ranks are done.
update.take_result()

mpinn.check_with_allreduce(network)
accuracy = digits_data.accuracy(network, test_set)
largest_lead = mpi.allreduce(largest_lead, op="max")
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % with the server's parameters")
    print(f"the largest lead was {largest_lead} steps, of at most {options.staleness}")
assert largest_lead <= options.staleness, f"a lead of {largest_lead} steps, more than {options.staleness}"
assert accuracy >= options.at_least, f"accuracy {accuracy}, but {options.at_least} was to be reached"
mpi.stop()
