"""Digit recognition by local SGD: each rank trains alone, and parameters are averaged now and then.

    torchmpirun -n 4 examples/digits_local_sgd.py --period 8
    ...
    accuracy 98.61 %, parameters averaged every 8 steps on 4 ranks
    torchmpirun -n 4 examples/digits_local_sgd.py --period 8 --start 120                # post-local: together at first
    torchmpirun -n 4 examples/digits_local_sgd.py --period 32 --group-period 4          # often in pairs of ranks
    torchmpirun -n 4 examples/digits_local_sgd.py --period 8 --slow-momentum 0.5        # SlowMo

Between the averages nothing is sent, and no rank waits for another one.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, optim
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = digits_data.parser(__doc__)
parser.add_argument("--period", type=int, default=8, help="steps between averages over all ranks")
parser.add_argument("--group-period", type=int, help="steps between averages over pairs of ranks; default: none")
parser.add_argument("--start", type=int, default=0, help="steps with an average after each, before")
parser.add_argument("--slow-momentum", type=float, default=0.0, help="momentum of what the averages change")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
mpinn.synchronize_parameters(network)

period = options.period
if options.group_period:  # on several nodes mpi.communicator(1), the ranks of a node, takes the place of the pair
    pair = mpi.split(mpi.rank() // 2)
    period = {pair: options.group_period, mpi.communicator(0): options.period}
sgd = torch.optim.SGD(network.parameters(), lr=options.lr)
optimizer = optim.LocalSGD(sgd, period, start=options.start, slow_momentum=options.slow_momentum)

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

# The result is the average.
optimizer.average()

accuracy = curve.end()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} %, parameters averaged every {options.period} steps on {mpi.size()} ranks")
mpi.stop()
