"""Digit recognition with Downpour SGD: every rank trains alone, and streams its gradients to a parameter server.

    torchmpirun -n 4 examples/mnist_parameterserver_downpour.py
    ...
    accuracy 98.06 % with the server's parameters

No rank waits for another one. Every --send-frequency steps a rank sends the sum of its gradients, times a learning
rate, and every --update-frequency steps it takes the server's parameters for its own; they were fetched --prefetch
steps before, while it went on. Runs are not reproducible to the bit: who comes when is chance.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, paramserver as ps
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = digits_data.parser(__doc__)
parser.add_argument(
    "--momentum", type=float, default=0.0, help="Nesterov's, each rank's own; 0.9 takes a tenth of --lr"
)
parser.add_argument("--init-delay", type=int, default=20, help="steps before the server is seeded")
parser.add_argument("--update-frequency", type=int, default=5, help="steps between the server's parameters")
parser.add_argument("--send-frequency", type=int, default=5, help="steps between sends")
parser.add_argument("--prefetch", type=int, default=1, help="steps by which parameters are fetched early")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
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
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
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

accuracy = curve.end()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % with the server's parameters")
mpi.stop()
