"""Digit recognition on several ranks: each computes on its share of every batch, gradients are averaged.

    torchmpirun -n 4 examples/mnist_allreduce.py
    ...
    parameters are bit-identical on all 4 ranks
    test loss 0.0572, accuracy 98.61 %

The batch is split over the ranks, so that any number of them takes the same steps as one (mnist_sequential.py). A batch
that cannot be split evenly is rounded up.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn
from torchmpi_py.engine import (
    Accuracy,
    AllReduceSGDEngine,
    Average,
    Checkpoint,
    DatasetIterator,
    EpochLines,
    ProgressBar,
)

parser = digits_data.parser(__doc__)
parser.add_argument("--asynchronous", action="store_true", help="average gradients during the backward pass")
parser.add_argument("--sharded", action="store_true", help="divide the optimizer's state among the ranks")
parser.add_argument("--flavour", help="how an allreduce goes, such as ring; default: the selector's choice")
parser.add_argument("--usegpu", action="store_true", help="one GPU per rank")
parser.add_argument("--progress", action="store_true", help="show a bar on rank 0")
parser.add_argument("--save", help="file for the final parameters")
parser.add_argument(
    "--checkpoint", help="folder for checkpoints, after each epoch; if it holds any, go on from the last"
)
options = parser.parse_args()

mpi.start(with_cuda=options.usegpu)
batch_size = -(-options.batch // mpi.size())
if mpi.rank() == 0 and batch_size * mpi.size() != options.batch:
    print(
        f"batch of {options.batch} rounded up to {batch_size * mpi.size()}, {batch_size} on each of {mpi.size()} ranks"
    )

train_set, test_set, network = digits_data.prepare(options)
criterion = torch.nn.CrossEntropyLoss()

engine = AllReduceSGDEngine(usegpu=options.usegpu, asynchronous=options.asynchronous, sharded=options.sharded)
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
if options.flavour:
    mpi.selector["allreduce"] = options.flavour
extensions = [ProgressBar() if options.progress else EpochLines()]
if options.checkpoint:
    extensions.append(Checkpoint(options.checkpoint))

engine.train(
    network=network,
    criterion=criterion,
    iterator=DatasetIterator(train_set, batch_size, seed=options.seed),
    lr=options.lr,
    maxepoch=options.epochs,
    extensions=extensions,
)
curve.end()

loss, accuracy = Average(), Accuracy()


def measure(state):
    """Count what is tested."""
    loss.add(state.loss, state.num_samples)
    accuracy.add(state.output, state.sample[1], state.num_samples)


engine.hooks.on_forward_criterion = measure
engine.test(network=network, criterion=criterion, iterator=DatasetIterator(test_set, batch_size, shuffle=False))

final_loss, final_accuracy = loss.reduced(), accuracy.reduced()
mpinn.check_with_allreduce(network)
mpi.check_with_allreduce(final_accuracy, "final accuracy")
if mpi.rank() == 0:
    print(f"parameters are bit-identical on all {mpi.size()} ranks")
    print(f"test loss {final_loss:.4f}, accuracy {100 * final_accuracy:.2f} %")
    if options.save:
        torch.save(network.state_dict(), options.save)
mpi.stop()
