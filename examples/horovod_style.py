"""Digit recognition as a script for Horovod has it: behind each line of distribution stands Horovod's own.

    torchmpirun -n 2 examples/horovod_style.py
    2 ranks, in the style of Horovod: test accuracy 98.33 %

A sampler for each rank, a wrapped optimizer, gradients that may be clipped before the step, a measure that is averaged.
docs/from_horovod.md has all names, and what is a trap: mpi.allreduce works in place, and sums without op="avg".
"""

import digits_data
import torch
from torch.utils.data import DataLoader, DistributedSampler

import torchmpi_py as mpi  # import horovod.torch as hvd
from torchmpi_py import nn as mpinn, optim

COMPRESSIONS = {"none": lambda: None, "fp16": optim.compression.FP16}  # hvd.Compression.none, .fp16
parser = digits_data.parser(__doc__)
parser.add_argument("--clip", type=float, help="largest norm of the gradients")
parser.add_argument("--compression", choices=COMPRESSIONS, default="none")
options = parser.parse_args()

mpi.start()  # hvd.init()
train_set, test_set, network = digits_data.prepare(options)
sampler = DistributedSampler(train_set, mpi.size(), mpi.rank(), seed=options.seed)  # hvd.size(), hvd.rank()
loader = DataLoader(train_set, -(-options.batch // mpi.size()), sampler=sampler)
share = torch.arange(mpi.rank(), len(test_set), mpi.size())  # of the test set, for this rank

optimizer = torch.optim.SGD(network.parameters(), options.lr)
mpinn.synchronize_parameters(network)  # hvd.broadcast_parameters(network.state_dict(), root_rank=0)
optim.broadcast_optimizer_state(optimizer)  # hvd.broadcast_optimizer_state(optimizer, root_rank=0)
# hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters(), compression=...)
optimizer = optim.DistributedOptimizer(optimizer, network, compression=COMPRESSIONS[options.compression]())

curve = digits_data.Curve(options, network, test_set)
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for images, labels in curve.steps(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        if options.clip:  # the gradients are averages here: without hvd's synchronize() and skip_synchronize()
            torch.nn.utils.clip_grad_norm_(network.parameters(), options.clip)
        optimizer.step()
curve.end()

images, labels = test_set[share]
with torch.no_grad():
    num_correct = (network(images).argmax(1) == labels).sum()
mpi.allreduce(num_correct)  # hvd.allreduce(num_correct, op=hvd.Sum), in place
if mpi.rank() == 0:
    accuracy = 100 * num_correct.item() / len(test_set)
    print(f"{mpi.size()} ranks, in the style of Horovod: test accuracy {accuracy:.2f} %")
mpi.stop()  # hvd.shutdown()
