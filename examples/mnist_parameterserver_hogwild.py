"""Digit recognition with Hogwild: the ranks of a node train one copy of the weights, without locks.

    torchmpirun -n 4 examples/mnist_parameterserver_hogwild.py
    ...
    accuracy 98.61 % with the weights that all ranks share

The weights lie in memory that all ranks share, and every rank's optimizer changes them in place, whatever the others
do. Nothing is sent, and nobody waits. Runs are not reproducible to the bit: who comes when is chance.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, paramserver as ps
from torchmpi_py.engine import DatasetIterator, SGDEngine

options = digits_data.parser(__doc__).parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)

hogwild = ps.Hogwild(network)  # rank 0's values, on all ranks

engine = SGDEngine()
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
    lr=options.lr / mpi.size(),  # with n ranks there are n times as many steps
    maxepoch=options.epochs,
)
mpi.barrier()
accuracy = curve.end()

mpinn.check_with_allreduce(network)
bias = network[-1].bias.detach()
if mpi.rank() == mpi.size() - 1:
    bias += 1  # which all ranks see, and which changes no decision
mpi.barrier()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % with the weights that all ranks share")
mpi.stop()
