"""Digit recognition with elastic averaging (EASGD): every rank trains alone, tied to a common centre.

    torchmpirun -n 4 examples/mnist_parameterserver_easgd.py
    ...
    accuracy 98.89 % at the centre, which has moved by 5.67

A parameter server holds the centre. Every --update-frequency steps a rank and the centre move towards each other. No
rank waits for another one. With momentum, which is each rank's own, it is called EAMSGD. Runs are not reproducible to
the bit: who comes when is chance.
"""

import digits_data
import torch
from torch.nn.utils import parameters_to_vector

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, paramserver as ps
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = digits_data.parser(__doc__)
parser.add_argument(
    "--momentum", type=float, default=0.0, help="Nesterov's, each rank's own; 0.9 takes a tenth of --lr"
)
parser.add_argument("--beta", type=float, default=0.9, help="how far all workers together move the centre")
parser.add_argument("--init-delay", type=int, default=20, help="steps before the centre is seeded")
parser.add_argument("--update-frequency", type=int, default=10, help="steps between exchanges")
parser.add_argument("--prefetch", type=int, default=5, help="steps by which the centre is fetched early")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
mpinn.synchronize_parameters(network)

schedule = {
    "beta": options.beta,
    "init_delay": options.init_delay,
    "update_frequency": options.update_frequency,
    "prefetch": options.prefetch,
}
if options.momentum > 0:
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=options.momentum, nesterov=True)
    update = ps.EAMSGDUpdate(network, optimizer, **schedule)
else:
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr)
    update = ps.EASGDUpdate(network, **schedule)


def exchange(state):
    """What is due after this step, which state.t counts already."""
    global seeded
    update.update(state.t - 1)
    if state.t - 1 == options.init_delay and mpi.rank() == 0:
        seeded = parameters_to_vector(network.parameters()).detach().clone()  # the centre begins here


engine = SGDEngine()
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
engine.hooks.on_update = exchange
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
    optimizer=optimizer,
    maxepoch=options.epochs,
)

# The result is the centre, when all ranks are done.
update.take_result()

accuracy = curve.end()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    moved = (parameters_to_vector(network.parameters()) - seeded).norm().item()
    print(f"accuracy {100 * accuracy:.2f} % at the centre, which has moved by {moved:.2f}")
    assert moved > 0.1, "the centre has to move"
mpi.stop()
