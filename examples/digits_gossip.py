"""Digit recognition by gossip: after each step a rank averages its parameters with partners, and with nobody else.

    torchmpirun -n 4 examples/digits_gossip.py
    ...
    accuracy 98.33 % after gossip among 4 ranks, partners: ring
    torchmpirun -n 4 examples/digits_gossip.py --partners random
    torchmpirun -n 4 examples/digits_gossip.py --asynchronous       # while the next step is computed

There is no step in which all ranks meet. What one rank has learned reaches the others from partner to partner.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, optim
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = digits_data.parser(__doc__)
parser.add_argument("--partners", choices=["ring", "random"], default="ring", help="both neighbours, or one rank")
parser.add_argument("--asynchronous", action="store_true", help="exchange during the next step")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
mpinn.synchronize_parameters(network)

sgd = torch.optim.SGD(network.parameters(), lr=options.lr)
optimizer = optim.Gossip(sgd, options.partners, asynchronous=options.asynchronous, seed=options.seed)

engine = SGDEngine()  # gradients stay each rank's own
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
    optimizer=optimizer,
    maxepoch=options.epochs,
)

# The result is the average over all ranks.
optimizer.average()

accuracy = curve.end()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % after gossip among {mpi.size()} ranks, partners: {options.partners}")
mpi.stop()
