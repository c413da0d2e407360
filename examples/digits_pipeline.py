"""Digit recognition by a pipeline: each rank has some of the layers, and micro-batches pass from rank to rank.

    torchmpirun -n 2 examples/digits_pipeline.py
    accuracy 98.06 %, by a pipeline of 2 stages

The first rank sends the activations of its layers to the second, and so on; the last one computes the loss. While a
stage works on one micro-batch, others work on the next. Gradients go the other way. A step has the gradients of the
whole batch, so that any number of stages trains as one process does.
"""

import digits_data
import torch
from torch.utils.data import DataLoader

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn

parser = digits_data.parser(__doc__)
parser.add_argument("--micro-batches", type=int, default=4, help="parts of a batch that are under way at once")
parser.add_argument("--save", help="file for the final parameters, whole")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
if mpi.size() > len(network):
    raise SystemExit(f"{mpi.size()} ranks, but the network has {len(network)} layers: start fewer ranks")
bounds = [len(network) * rank // mpi.size() for rank in range(mpi.size() + 1)]
stage = network[bounds[mpi.rank()] : bounds[mpi.rank() + 1]]
is_first, is_last = mpi.rank() == 0, mpi.rank() == mpi.size() - 1


def forward(images):
    """The output of this rank's layers: on the last rank the network's, on the others what it sends on."""
    return stage(images if is_first else mpinn.recv(mpi.rank() - 1))


@torch.no_grad()
def accuracy(stage, test_set):
    """The share that the network recognizes, which the last rank finds and all return."""
    images, labels = test_set.tensors
    outputs = forward(images)
    if is_last:
        return mpi.broadcast((outputs.argmax(1) == labels).double().mean().item(), mpi.size() - 1)
    mpinn.send(outputs, mpi.rank() + 1)
    return mpi.broadcast(0.0, mpi.size() - 1)


parameters = list(stage.parameters())  # some stages have none
optimizer = torch.optim.SGD(parameters, lr=options.lr) if parameters else None
curve = digits_data.Curve(options, stage, test_set, accuracy)
generator = torch.Generator().manual_seed(options.seed)  # the same order on all ranks
batches = DataLoader(train_set, options.batch, shuffle=True, generator=generator)
for _ in range(options.epochs):
    for images, labels in curve.steps(batches):
        stage.zero_grad()
        ends = []
        parts = zip(images.chunk(options.micro_batches), labels.chunk(options.micro_batches), strict=True)
        for inputs, targets in parts:
            outputs = forward(inputs)
            if is_last:
                share = len(targets) / len(labels)
                ends.append(torch.nn.functional.cross_entropy(outputs, targets) * share)
            else:
                ends.append(mpinn.send(outputs, mpi.rank() + 1))
        for end in ends:
            if end.requires_grad:
                end.backward()
        if optimizer is not None:
            optimizer.step()

result = curve.end()
if mpi.rank() == 0:
    print(f"accuracy {100 * result:.2f} %, by a pipeline of {mpi.size()} stages")
states = mpi.allgather_object(stage.state_dict())
if options.save and mpi.rank() == 0:
    torch.save({key: value for state in states for key, value in state.items()}, options.save)
mpi.stop()
