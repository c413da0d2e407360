"""Digit recognition with torch's FSDP2 over MPI: each rank keeps its share of parameters and optimizer state.

    torchmpirun -n 2 examples/fsdp_digits.py --epochs 5 --save runs/5
    2 ranks, epochs 0 to 5: test accuracy 95.28 %
    torchmpirun -n 3 examples/fsdp_digits.py --epochs 15 --load runs/5
    3 ranks, epochs 5 to 15: test accuracy 98.06 %

The second job goes on where the first one ended, on another number of ranks.
"""

import digits_data
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import torchmpi_py.torch_backend  # noqa: F401  (the backend "torchmpi")

parser = digits_data.parser(__doc__)
parser.add_argument("--backend", default="torchmpi")
parser.add_argument("--save", help="folder for a checkpoint of the end, to which every rank writes its share")
parser.add_argument("--load", help="folder with a checkpoint to go on from")
options = parser.parse_args()

dist.init_process_group(options.backend)
rank, num_ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (num_ranks,))

train_set, test_set, model = digits_data.prepare(options)  # all parameters on every rank, of which it keeps its share
for layer in model:
    if list(layer.parameters()):
        fully_shard(layer, mesh=mesh)  # gathered when it is used, and let go of after that
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.5)


def state(epochs):
    """What a checkpoint holds."""
    network, optimizer_state = get_state_dict(model, optimizer)
    return {"network": network, "optimizer": optimizer_state, "epochs": epochs}


first = 0
if options.load:
    saved = state(0)
    dcp.load(saved, checkpoint_id=options.load)
    set_state_dict(model, optimizer, model_state_dict=saved["network"], optim_state_dict=saved["optimizer"])
    first = saved["epochs"]

sampler = DistributedSampler(train_set, seed=options.seed, drop_last=True)
loader = DataLoader(train_set, options.batch // num_ranks, sampler=sampler, drop_last=True)

curve = digits_data.Curve(options, model, test_set)  # every rank takes part in tests, as layers are gathered
for epoch in range(first, options.epochs):
    sampler.set_epoch(epoch)
    for images, labels in curve.steps(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

accuracy = curve.end()
if rank == 0:
    print(f"{num_ranks} ranks, epochs {first} to {options.epochs}: test accuracy {100 * accuracy:.2f} %")
if options.save:
    dcp.save(state(options.epochs), checkpoint_id=options.save)
dist.destroy_process_group()
