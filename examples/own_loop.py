"""Digit recognition by a loop of one's own, with a plain optimizer: the seven lines that end in "# mpi" are added.

    torchmpirun -n 2 examples/own_loop.py
    2 ranks, gradients averaged by hand: loss 0.0109, test accuracy 98.33 %

Every rank computes on its share of each batch, and the gradients are averaged before the step; with --asynchronous they
travel during the backward pass. digits_own_loop.py has the optimizers that do this by themselves.
"""

import digits_data
import torch
from torch.utils.data import DataLoader

import torchmpi_py as mpi  # mpi
from torchmpi_py import nn as mpinn  # mpi

parser = digits_data.parser(__doc__)
parser.add_argument("--asynchronous", action="store_true", help="average gradients during the backward pass")
options = parser.parse_args()

mpi.start()  # mpi
train_set, test_set, network = digits_data.prepare(options)
sampler = mpi.shard(train_set, seed=options.seed)  # mpi
loader = DataLoader(train_set, -(-options.batch // mpi.size()), sampler=sampler)
optimizer = torch.optim.SGD(network.parameters(), options.lr)
mpinn.synchronize_parameters(network)  # mpi
reduction = mpinn.register_async_backward(network) if options.asynchronous else None

curve = digits_data.Curve(options, network, test_set)
for _ in range(options.epochs):
    total = 0.0
    for images, labels in curve.steps(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        if reduction is None:
            mpinn.synchronize_gradients(network)  # mpi
        else:
            reduction.synchronize()
        optimizer.step()
        total += loss.item()

mean = mpi.allreduce(total / len(loader), op="avg")  # mpi
accuracy = curve.end()
if mpi.is_chief():
    print(f"{mpi.size()} ranks, gradients averaged by hand: loss {mean:.4f}, test accuracy {100 * accuracy:.2f} %")
mpi.stop()
