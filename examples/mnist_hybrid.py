"""Digit recognition as multi-node Caffe did it: data-parallel convolutions, linear layers divided over a few ranks.

    torchmpirun -n 4 examples/mnist_hybrid.py --ranks-per-group 2
    accuracy 98.61 %, linear layers in groups of 2

Convolutions are small and take most of the time: every rank has them, and computes with its own share of each batch.
Linear layers hold most parameters: the ranks of a group divide them, gather their activations, and compute on all of
the group's samples. Gradients of the convolutions add up over all ranks, and gradients of a part of a linear layer over
the ranks that hold the same part. The steps are those of one process (mnist_sequential.py).
"""

import digits_data
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchmpi_py.torch_backend  # noqa: F401  (the backend "torchmpi")
from torchmpi_py.engine import DatasetIterator

parser = digits_data.parser(__doc__)
parser.add_argument("--ranks-per-group", type=int, default=2, help="ranks that divide the linear layers")
parser.add_argument("--save", help="file for the final parameters, whole")
options = parser.parse_args()

dist.init_process_group("torchmpi")
num_ranks = dist.get_world_size()
if options.ranks_per_group < 1 or num_ranks % options.ranks_per_group:
    parser.error(f"--ranks-per-group: {num_ranks} ranks cannot be divided into groups of {options.ranks_per_group}")
groups = num_ranks // options.ranks_per_group
if options.batch % groups:
    parser.error(f"--batch: {options.batch} samples cannot be divided among {groups} groups")
mesh = init_device_mesh("cpu", (groups, options.ranks_per_group), mesh_dim_names=("groups", "parts"))
parts = mesh["parts"]

train_set, test_set, network = digits_data.prepare(options)  # the same on every rank
convolutions, linear = network[:6], network[6:]
plan = {"6": ColwiseParallel(input_layouts=Shard(0), use_local_output=False), "8": RowwiseParallel()}
parallelize_module(linear, parts, plan)
optimizer = torch.optim.SGD(network.parameters(), lr=options.lr)


def output(images):
    """What the network gives for the samples of a group, of which each rank takes its share through convolutions."""
    mine = convolutions(distribute_tensor(images, parts, [Shard(0)], src_data_rank=None).to_local())
    shape = len(images), mine.shape[1]  # needed because shares may be unequal
    return linear(DTensor.from_local(mine, parts, [Shard(0)], shape=shape, stride=(shape[1], 1)))


@torch.no_grad()
def accuracy(network, test_set):
    """The share of the test set that the ranks of each group recognize together."""
    images, labels = test_set.tensors
    return (output(images).argmax(1) == labels).double().mean().item()


curve = digits_data.Curve(options, network, test_set, accuracy)
group = mesh.get_local_rank("groups")
batches = DatasetIterator(train_set, options.batch // groups, seed=options.seed, rank=group, size=groups)
for _ in range(options.epochs):
    for images, labels in curve.steps(batches):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(output(images), labels)
        (loss * batches.weight / groups).backward()  # the group's share of the batch's loss, so gradients add up
        for p in convolutions.parameters():
            dist.all_reduce(p.grad)
        for p in linear.parameters():
            dist.all_reduce(p.grad.to_local(), group=mesh.get_group("groups"))
        optimizer.step()

result = curve.end()
state = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in network.state_dict().items()}
if dist.get_rank() == 0:
    print(f"accuracy {100 * result:.2f} %, linear layers in groups of {options.ranks_per_group}")
    if options.save:
        torch.save(state, options.save)
dist.destroy_process_group()
