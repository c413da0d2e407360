"""Digit recognition with torch's FSDP2 over MPI: each rank keeps its share of parameters and optimizer state.

    torchmpirun -n 2 examples/fsdp_digits.py --steps 100 --save runs/100
    torchmpirun -n 3 examples/fsdp_digits.py --steps 300 --load runs/100

The second job goes on where the first one ended, on another number of ranks.
"""

import argparse
import itertools

import digits_data
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import torchmpi_py.torch_backend  # noqa: F401  (the backend "torchmpi")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300, help="up to this one")
parser.add_argument("--batch", type=int, default=60, help="samples per step, over all ranks")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--backend", default="torchmpi")
parser.add_argument("--save", help="folder for a checkpoint of the end, to which every rank writes its share")
parser.add_argument("--load", help="folder with a checkpoint to go on from")
options = parser.parse_args()

dist.init_process_group(options.backend)
rank, num_ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (num_ranks,))

torch.manual_seed(options.seed)  # the same parameters on every rank, of which it keeps its share
train_set, test_set = digits_data.load()
model = digits_data.conv_net(image_size=8)
for layer in model:
    if list(layer.parameters()):
        fully_shard(layer, mesh=mesh)  # gathered when it is used, and let go of after that
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.5)


def state(step):
    """What a checkpoint holds."""
    network, optimizer_state = get_state_dict(model, optimizer)
    return {"network": network, "optimizer": optimizer_state, "step": step}


first = 0
if options.load:
    saved = state(0)
    dcp.load(saved, checkpoint_id=options.load)
    set_state_dict(model, optimizer, model_state_dict=saved["network"], optim_state_dict=saved["optimizer"])
    first = saved["step"]

sampler = DistributedSampler(train_set, seed=options.seed, drop_last=True)
loader = DataLoader(train_set, options.batch // num_ranks, sampler=sampler, drop_last=True)


def batches():
    """Epoch after epoch."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


for images, labels in itertools.islice(batches(), first, options.steps):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()

accuracy = digits_data.accuracy(model, test_set)  # every rank takes part, as layers are gathered
if rank == 0:
    print(f"{num_ranks} ranks, steps {first} to {options.steps}: test accuracy {100 * accuracy:.2f} %")
if options.save:
    dcp.save(state(options.steps), checkpoint_id=options.save)
dist.destroy_process_group()
