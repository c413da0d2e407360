"""Digit recognition with a network that is partly split: convolutions on all ranks, linear layers split over few.

    torchmpirun -n 4 examples/mnist_modelparallel.py --ranks-per-group 2
    ...
    16746 of 33482 parameters of the linear layers on rank 0, in groups of 2
    accuracy 98.61 %

Every rank computes the convolutions of its share of each batch. The ranks of a group bring their activations together,
each computes with its part of the linear layers for all of them, and gets back what belongs to its share. With groups
of one rank this is mnist_allreduce.py; any grouping takes the same steps as one process (mnist_sequential.py).
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

parser = digits_data.parser(__doc__)
parser.add_argument("--ranks-per-group", type=int, help="ranks that share the linear layers; default: all")
parser.add_argument("--save", help="file for the final parameters, whole")
options = parser.parse_args()

mpi.start()
ranks_per_group = options.ranks_per_group or mpi.size()
for name, total, count in (
    ("--ranks-per-group", mpi.size(), ranks_per_group),
    ("--batch", options.batch, mpi.size()),
):
    if count < 1 or total % count:
        parser.error(f"{name}: {total} cannot be divided by {count}")
group = mpi.split(mpi.rank() // ranks_per_group)

train_set, test_set, network = digits_data.prepare(options)
*convolutions, first, relu, last = network
head = mpinn.ModelParallel(
    mpinn.ColumnParallelLinear.from_linear(first, comm=group, gather_output=False),
    relu,
    mpinn.RowParallelLinear.from_linear(last, comm=group, input_is_split=True),
    comm=group,
)
network = torch.nn.Sequential(*convolutions, head)

engine = AllReduceSGDEngine(asynchronous=True)
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(train_set, options.batch // mpi.size(), seed=options.seed),
    lr=options.lr,
    maxepoch=options.epochs,
)

mpinn.check_with_allreduce(network)  # each part is equal on the ranks that hold it
accuracy = mpi.allreduce(curve.end(), op="avg")  # all ranks compute it together
here = sum(p.numel() for p in head.parameters())
whole = sum(p.numel() for layer in (first, last) for p in layer.parameters())
state = network.state_dict()  # collective: the whole parameters
if mpi.rank() == 0:
    print(f"{here} of {whole} parameters of the linear layers on rank 0, in groups of {ranks_per_group}")
    print(f"accuracy {100 * accuracy:.2f} %")
    if options.save:
        torch.save(state, options.save)
mpi.stop()
