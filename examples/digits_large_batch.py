"""Digit recognition with a batch that grows with the number of ranks, and a learning rate that follows it.

    torchmpirun -n 4 examples/digits_large_batch.py
    ...
    accuracy 98.06 % with a batch of 240
    torchmpirun -n 4 examples/digits_large_batch.py --layerwise lars --lr 1.0
    ...
    accuracy 97.78 % with a batch of 240

Each rank computes on --batch samples, so that all together make fewer and larger steps. The learning rate is multiplied
by the number of ranks, and grows to that value gradually: linear scaling with warm-up. --layerwise also scales the step
of each layer to the norm of its parameters, by LARS or LAMB from the package pytorch-optimizer.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, optim
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

parser = digits_data.parser(__doc__)
parser.add_argument("--factor", type=float, help="the batch of all ranks over --batch; default: the number of ranks")
parser.add_argument("--warmup-steps", type=int, default=30, help="steps until the learning rate is reached")
parser.add_argument("--layerwise", choices=["lars", "lamb"], help="take LARS or LAMB in place of SGD")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
factor = options.factor or mpi.size()

if options.layerwise:
    import pytorch_optimizer

    layerwise = {"lars": pytorch_optimizer.LARS, "lamb": pytorch_optimizer.Lamb}[options.layerwise]
    optimizer = layerwise(network.parameters(), lr=options.lr)
else:
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr)
schedule = optim.large_batch(optimizer, factor, warmup_steps=options.warmup_steps)

engine = AllReduceSGDEngine()
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
engine.hooks.on_update = lambda state: schedule.step()
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, round(options.batch * factor / mpi.size()), seed=options.seed),
    optimizer=optimizer,
    maxepoch=options.epochs,
)

accuracy = curve.end()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % with a batch of {options.batch * factor:g}")
mpi.stop()
