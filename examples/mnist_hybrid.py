"""Digit recognition as multi-node Caffe did it: a parameter server for convolutions, split layers on top.

    torchmpirun -n 4 examples/mnist_hybrid.py --ranks-per-group 2
    accuracy 98.61 %, linear layers in groups of 2

Convolutions are small and take most of the time: every rank has them, computes with its share of each batch, and sends
their gradients to a parameter server. Linear layers hold most parameters: the ranks of a small group divide them, and
compute together on the activations of all, so that those gradients travel between equal parts of groups alone. The
steps are those of one process (mnist_sequential.py).
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, paramserver as ps
from torchmpi_py.engine import DatasetIterator

parser = digits_data.parser(__doc__)
parser.add_argument("--ranks-per-group", type=int, default=2, help="ranks that divide the linear layers")
options = parser.parse_args()

mpi.start()
for name, total, count in (
    ("--ranks-per-group", mpi.size(), options.ranks_per_group),
    ("--batch", options.batch, mpi.size()),
):
    if count < 1 or total % count:
        parser.error(f"{name}: {total} cannot be divided by {count}")
group = mpi.split(mpi.rank() // options.ranks_per_group)

train_set, test_set, network = digits_data.prepare(options)
*convolutions, first, relu, last = network
below = torch.nn.Sequential(*convolutions)
top = mpinn.ModelParallel(
    mpinn.ColumnParallelLinear.from_linear(first, comm=group, gather_output=False),
    relu,
    mpinn.RowParallelLinear.from_linear(last, comm=group, input_is_split=True),
    comm=group,
)
network = torch.nn.Sequential(below, top)
server = ps.SynchronousUpdate(below, optimizer="sgd", lr=options.lr)
optimizer = torch.optim.SGD(top.parameters(), lr=options.lr)

curve = digits_data.Curve(options, network, test_set)
batches = DatasetIterator(train_set, options.batch // mpi.size(), seed=options.seed)
for _ in range(options.epochs):
    for images, labels in curve.steps(batches):
        network.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        (loss * batches.weight).backward()  # the last batch of an epoch may be cut into unequal shares
        mpinn.synchronize_gradients(top)
        optimizer.step()
        server.update()

accuracy = mpi.allreduce(curve.end(), op="avg")  # all ranks compute it together
mpinn.check_with_allreduce(network)  # each part is equal on the ranks that hold it
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} %, linear layers in groups of {options.ranks_per_group}")
mpi.stop()
