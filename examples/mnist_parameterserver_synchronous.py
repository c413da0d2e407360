"""Digit recognition with a synchronous parameter server: the optimizer runs there, each rank holding a share of it.

    torchmpirun -n 4 examples/mnist_parameterserver_synchronous.py
    ...
    accuracy 98.61 %, after sgd at the server
    torchmpirun -n 4 examples/mnist_parameterserver_synchronous.py --optimizer adam --lr 0.002

In every step all ranks add their gradients to the server, each rank updates the part that it holds, and all fetch the
parameters. The result is that of one process (mnist_sequential.py), and no rank has all of the optimizer's state.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, paramserver as ps
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = digits_data.parser(__doc__)
parser.add_argument("--optimizer", choices=["sgd", "adagrad", "adam"], default="sgd", help="the server's")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
mpinn.synchronize_parameters(network)
server = ps.SynchronousUpdate(network, optimizer=options.optimizer, lr=options.lr)

engine = SGDEngine()
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
engine.hooks.on_update = lambda state: server.update()
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
    lr=0,  # no step here: the server does it
    maxepoch=options.epochs,
)

accuracy = curve.end()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} %, after {options.optimizer} at the server")
mpi.stop()
