"""Digit recognition with bounded staleness (SSP): ranks run ahead of each other, but not further than agreed.

    torchmpirun -n 4 examples/mnist_parameterserver_ssp.py --staleness 3 --pause 0.01
    ...
    accuracy 98.06 % with the server's parameters
    the largest lead was 3 steps, of at most 3

In every step a rank adds to a parameter server what its optimizer has changed. The fastest rank may be --staleness
steps ahead of the slowest one, then it waits. With --staleness 0 this is synchronous training. --pause makes the last
rank sleep in every step, to see the bound at work.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, paramserver as ps
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = digits_data.parser(__doc__)
parser.add_argument("--staleness", type=int, default=3, help="steps that the fastest may be ahead of the slowest")
parser.add_argument("--init-delay", type=int, default=0, help="steps before the server is seeded")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
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
    if step > options.init_delay:  # before, every rank trains alone
        steps.send(own_step, "add")  # comes before what the update sends
    update.update(step)
    completed = steps.receive().wait()
    largest_lead = max(largest_lead, int(completed[mpi.rank()] - completed.min()))


engine = SGDEngine()
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
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

accuracy = curve.end()
mpinn.check_with_allreduce(network)
largest_lead = mpi.allreduce(largest_lead, op="max")
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % with the server's parameters")
    print(f"the largest lead was {largest_lead} steps, of at most {options.staleness}")
assert largest_lead <= options.staleness, f"a lead of {largest_lead} steps, more than {options.staleness}"
mpi.stop()
