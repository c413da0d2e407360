"""A small GPT that learns to write the source of Python's library, or the text of --data, by a loop of one's own.

    torchmpirun -n 2 examples/gpt.py
    ...
    step 800: loss 1.9663, 14952 tokens/s

Every rank draws the same batch of --batch sequences and trains on its slice, so that any number of ranks has the losses
of one process. --ddp and --fsdp train by torch's DistributedDataParallel and fully_shard over the backend "torchmpi".
"""

import argparse
import glob
import json
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchmpi_py as mpi
import torchmpi_py.torch_backend

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default=sysconfig.get_paths()["stdlib"] + "/*.py", help="text files, as 'books/*.txt'")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128, help="a multiple of 32, the width of an attention head")
parser.add_argument("--context", type=int, default=128, help="characters from which the next one is predicted")
parser.add_argument("--batch", type=int, default=12, help="sequences per step, over all ranks")
parser.add_argument("--steps", type=int, default=800)
parser.add_argument("--lr", type=float, default=0.003, help="largest learning rate")
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--curve", help="JSON file for [step, seconds, loss] of each line")
parser.add_argument("--backend", default="torchmpi", help="of torch.distributed")
ways = parser.add_mutually_exclusive_group()
ways.add_argument("--ddp", action="store_true", help="average gradients by torch's DistributedDataParallel")
ways.add_argument("--fsdp", action="store_true", help="divide parameters and optimizer state by torch's fully_shard")
options = parser.parse_args()


class Block(nn.Module):
    """Attention to the characters before, then a perceptron; each adds to what it reads."""

    def __init__(self, width):
        super().__init__()
        self.read, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        heads = self.read(self.norm_1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)  # (batch, heads, context, 32)
        x = x + self.mix(attention.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norm_2(x))


class GPT(nn.Module):
    """From characters (batch, context) to scores of each next one (batch, context, characters)."""

    def __init__(self, num_characters, width):
        super().__init__()
        self.characters = nn.Parameter(0.02 * torch.randn(num_characters, width))  # of the first and of the last layer
        self.places = nn.Parameter(0.02 * torch.randn(options.context, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(options.layers)], nn.LayerNorm(width))

    def forward(self, x):
        x = nn.functional.embedding(x, self.characters) + self.places[: x.shape[1]]
        return nn.functional.linear(self.blocks(x), self.characters)


mpi.start()
rank, num_ranks = mpi.rank(), mpi.size()
if options.batch % num_ranks:
    raise ValueError(f"gpt.py: {num_ranks} ranks cannot share --batch {options.batch}: give a multiple of {num_ranks}")
torch.manual_seed(options.seed)  # every rank has the same parameters, and draws the same batches
text = b"".join(Path(name).read_bytes() for name in sorted(glob.glob(options.data)))[:2_000_000]
alphabet, text = torch.frombuffer(bytearray(text), dtype=torch.uint8).unique(return_inverse=True)
model = network = GPT(len(alphabet), options.width)
if options.ddp or options.fsdp:
    dist.init_process_group(options.backend)
if options.ddp:
    model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
if options.fsdp:
    for part in (*network.blocks[:-1], network):
        fully_shard(part, mesh=dist.init_device_mesh("cpu", (num_ranks,)))
optimizer = torch.optim.AdamW(network.parameters())
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps, pct_start=0.1, cycle_momentum=False)
if not dist.is_initialized():
    optimizer = mpi.optim.DistributedOptimizer(optimizer, network)

begin, losses, points = time.perf_counter(), [], []
for step in range(1, options.steps + 1):
    places = torch.randint(len(text) - options.context, (options.batch, 1)).chunk(num_ranks)[rank]
    own = text[places + torch.arange(options.context + 1)]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    rate.step()
    losses.append(loss.item())
    if step % -(-options.steps // 20) == 0 or step == options.steps:
        points.append((step, time.perf_counter() - begin, mpi.allreduce(sum(losses) / len(losses), op="avg")))
        losses.clear()
        if rank == 0:
            speed = step * options.batch * options.context / points[-1][1]
            print(f"step {step}: loss {points[-1][2]:.4f}, {speed:.0f} tokens/s", flush=True)

written = text[None, :1]
for _ in range(300):  # on every rank, as FSDP wants it
    scores = network(written[:, -options.context :])
    written = torch.cat([written, scores[:, -1].softmax(-1).multinomial(1)], 1)
if rank == 0 and options.curve:
    Path(options.curve).write_text(json.dumps({"ranks": num_ranks, "points": points}))
if rank == 0:
    print(bytes(alphabet[written[0]].tolist()).decode(errors="replace"))
if dist.is_initialized():
    dist.destroy_process_group()
mpi.stop()
