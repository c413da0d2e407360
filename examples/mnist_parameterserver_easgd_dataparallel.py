"""Digit recognition with elastic averaging between groups of ranks, each of which trains one copy of the network.

    torchmpirun -n 4 examples/mnist_parameterserver_easgd_dataparallel.py
    ...
    2 workers, the first of 3 ranks
    accuracy 98.06 % at the centre, which has moved by 5.35

Groups have up to three ranks: with four ranks one of three and one of one, uneven on purpose. Within a group gradients
are averaged in every step; the group's first rank exchanges with the centre, and the others follow it. Groups do not
wait for each other.
"""

import math

import digits_data
import torch
from torch.nn.utils import parameters_to_vector

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, paramserver as ps
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

parser = digits_data.parser(__doc__)
parser.add_argument("--beta", type=float, default=0.9, help="how far all workers together move the centre")
parser.add_argument("--init-delay", type=int, default=20, help="steps before the centre is seeded")
parser.add_argument("--update-frequency", type=int, default=10, help="steps between exchanges")
parser.add_argument("--prefetch", type=int, default=3, help="steps by which the centre is fetched early")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
mpinn.synchronize_parameters(network)

iterator = DatasetIterator(
    train_set, -(-options.batch // mpi.size()), seed=options.seed, rank=mpi.rank(), size=mpi.size()
)
level = mpi.push_communicator(math.ceil((mpi.rank() + 1) / 3))
update = ps.EASGDUpdate(
    network,
    dataparallel_communicator=level,
    beta=options.beta,
    init_delay=options.init_delay,
    update_frequency=options.update_frequency,
    prefetch=options.prefetch,
)


def exchange(state):
    """What is due after this step, which state.t counts already."""
    global seeded
    update.update(state.t - 1)
    if state.t - 1 == options.init_delay and mpi.communicator(0).rank == 0:
        seeded = parameters_to_vector(network.parameters()).detach().clone()  # the centre begins here


engine = AllReduceSGDEngine()
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
engine.hooks.on_update = exchange
with mpi.at(level):  # the engine averages over the ranks of the current level: this group
    engine.train(
        network=network,
        criterion=torch.nn.CrossEntropyLoss(),
        iterator=iterator,
        lr=options.lr,
        maxepoch=options.epochs,
    )
    mpinn.check_with_allreduce(network)
    members = mpi.size()

# The result is the centre, when all ranks are done.
update.take_result()

accuracy = curve.end()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    moved = (parameters_to_vector(network.parameters()) - seeded).norm().item()
    print(f"{update.num_workers} workers, the first of {members} ranks")
    print(f"accuracy {100 * accuracy:.2f} % at the centre, which has moved by {moved:.2f}")
    assert moved > 0.1, "the centre has to move"
mpi.stop()
