"""Digit recognition with tensor parallelism: the ranks of a group share the linear layers, by torch's own DTensor.

    torchmpirun -n 4 examples/mnist_modelparallel.py --ranks-per-group 2
    16746 of 33482 parameters of the linear layers on rank 0, in groups of 2
    accuracy 98.89 %

The ranks of a group compute on the same batch. Each has all convolutions, half of the first linear layer's outputs and
half of the last one's inputs. Each group has its share of every batch, and equal parts average their gradients over the
groups. The steps are those of one process (mnist_sequential.py).
"""

import digits_data
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchmpi_py.torch_backend  # noqa: F401  (the backend "torchmpi")
from torchmpi_py.engine import DatasetIterator

parser = digits_data.parser(__doc__)
parser.add_argument("--ranks-per-group", type=int, help="ranks that share the linear layers; default: all")
parser.add_argument("--save", help="file for the final parameters, whole")
options = parser.parse_args()

dist.init_process_group("torchmpi")
num_ranks = dist.get_world_size()
ranks_per_group = options.ranks_per_group or num_ranks
if ranks_per_group < 1 or num_ranks % ranks_per_group:
    parser.error(f"--ranks-per-group: {num_ranks} ranks cannot be divided into groups of {ranks_per_group}")
groups = num_ranks // ranks_per_group
if options.batch % groups:
    parser.error(f"--batch: {options.batch} samples cannot be divided among {groups} groups")
mesh = init_device_mesh("cpu", (groups, ranks_per_group), mesh_dim_names=("data", "parts"))

train_set, test_set, network = digits_data.prepare(options)  # the same on every rank
# Activations between the two layers stay distributed, so that sizes need not be divisible by the ranks of a group.
plan = {"6": ColwiseParallel(use_local_output=False), "8": RowwiseParallel()}
parallelize_module(network, mesh["parts"], plan)
optimizer = torch.optim.SGD(network.parameters(), lr=options.lr)


def local(x):
    """The part of a parameter or gradient that this rank holds."""
    return x.to_local() if isinstance(x, DTensor) else x


curve = digits_data.Curve(options, network, test_set)
group = mesh.get_local_rank("data")
batches = DatasetIterator(train_set, options.batch // groups, seed=options.seed, rank=group, size=groups)
for _ in range(options.epochs):
    for images, labels in curve.steps(batches):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        (loss * batches.weight).backward()  # the last batch of an epoch may be cut into unequal shares
        for p in network.parameters():
            dist.all_reduce(local(p.grad), op=dist.ReduceOp.AVG, group=mesh.get_group("data"))
        optimizer.step()

accuracy = curve.end()  # all ranks compute it together
linear = list(network[6:].parameters())
state = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in network.state_dict().items()}
if dist.get_rank() == 0:
    here, whole = sum(local(p).numel() for p in linear), sum(p.numel() for p in linear)
    print(f"{here} of {whole} parameters of the linear layers on rank 0, in groups of {ranks_per_group}")
    print(f"accuracy {100 * accuracy:.2f} %")
    if options.save:
        torch.save(state, options.save)
dist.destroy_process_group()
