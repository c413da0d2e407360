"""What the ranks of the model call: every verb, on symmetric and on ordinary tensors, with its result checked."""

import dataclasses
import itertools

import torch
from protocol_model import explore, without_barrier
from protocol_ranks import Gpu, Ranks, model

from torchmpi_py.collectives.flavour import Sizes
from torchmpi_py.collectives.flavours import cudaipc
from torchmpi_py.collectives.flavours.cudaipc import CudaIpc
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.collectives.flavours.shared import Shared
from torchmpi_py.core import backoff, config
from torchmpi_py.core.channels import Channel
from torchmpi_py.memory import symmetric

SLICE = 64  # elements of a rank in a chunk that is staged
PIECE = 1024  # elements that scratch memory of flavour cudaipc takes here: a page


@dataclasses.dataclass
class Program:
    """What a rank's operations need."""

    rank: int
    size: int
    channel: Channel
    flavour: object
    chunk: int  # elements that pass in one piece
    number: int = 0  # of the operation
    way: int = 0  # of ordinary tensors: staged, single copy

    def __post_init__(self):
        self.memory = symmetric.memory(self.channel, 4 * 2 * self.chunk, torch.device("cpu"))
        self.own = torch.zeros(6 * self.chunk)  # ordinary memory that others may read
        self.channel.keep(NodeGroup, NodeGroup).trials = self

    def run(self, key, num_bytes, ways):
        """In the place of ``Trials.run``."""
        ways[self.way]()

    def symmetric(self, half=0):
        return self.memory.view(torch.float32)[half * self.chunk :][: self.chunk]

    def values(self, rank, count):
        """Of an operation; small whole numbers, whose sums are exact."""
        return torch.arange(count, dtype=torch.float32) + 1000 * rank + 7 * self.number

    def total(self, count):
        return sum(self.values(rank, count) for rank in range(self.size))

    def fill(self, x):
        x.copy_(self.values(self.rank, x.numel()))
        return x

    def ordinary(self, chunks):
        return torch.empty(chunks * self.chunk)


def check(x, expected):
    assert torch.equal(x, expected)


def allreduce(p, x):
    p.flavour.allreduce(p.channel, p.fill(x), x, "sum")
    check(x, p.total(x.numel()))


def allreduce_into(p, x, out):
    p.flavour.allreduce(p.channel, p.fill(x), out, "sum")
    check(out, p.total(x.numel()))


def reduce(p, x, root):
    p.fill(x)
    out = x if x.data_ptr() != p.memory.data_ptr() else p.symmetric(1)
    p.flavour.reduce(p.channel, x, out, "sum", root)
    if p.rank == root or out is x:
        check(out, p.total(x.numel()) if p.rank == root else p.values(p.rank, x.numel()))


def reduce_scatter(p, x):
    out = torch.empty(x.numel() // p.size)
    p.flavour.reduce_scatter(p.channel, p.fill(x), out, "sum")
    check(out, p.total(x.numel()).view(p.size, -1)[p.rank])


def broadcast(p, x, root):
    p.flavour.broadcast(p.channel, p.fill(x), root)
    check(x, p.values(root, x.numel()))


def gather(p, x, root, out=None):
    sizes = Sizes.equal(x, p.size)
    out = torch.empty(p.size * x.numel()) if out is None else out
    if root is None:
        p.flavour.allgather(p.channel, p.fill(x), out, sizes)
    else:
        p.flavour.gather(p.channel, p.fill(x), out if p.rank == root else None, root, sizes)
    if root in (None, p.rank):
        check(out, torch.cat([p.values(rank, x.numel()) for rank in range(p.size)]))


def unequal_gather(p, counts, root=None, is_symmetric=False):
    memory = p.memory.view(torch.float32) if is_symmetric else torch.empty(counts[p.rank])
    x = p.fill(memory[: counts[p.rank]])
    out = torch.empty(sum(counts)) if root in (None, p.rank) else None
    sizes = Sizes(counts, [4 * count for count in counts], [0] * p.size)
    if root is None:
        p.flavour.allgather(p.channel, x, out, sizes)
    else:
        p.flavour.gather(p.channel, x, out, root, sizes)
    if out is not None:
        check(out, torch.cat([p.values(rank, count) for rank, count in enumerate(counts)]))


def small_allgather(p, giver):
    """It begins without a meeting. One rank alone gives something: as much as a slot has room for."""
    unequal_gather(p, [p.chunk if rank == giver else 0 for rank in range(p.size)])


def allgather_in_place(p, out):
    count = out.numel() // p.size
    gather(p, out[p.rank * count :][:count], None, out[: p.size * count])


def alltoall(p, x):
    out = torch.empty_like(x)
    p.flavour.alltoall(p.channel, p.fill(x), out)
    check(out, torch.cat([p.values(rank, x.numel()).view(p.size, -1)[p.rank] for rank in range(p.size)]))


def scatter(p, x, root):
    out = torch.empty(x.numel() // p.size)
    p.flavour.scatter(p.channel, p.fill(x), out, root)
    check(out, p.values(root, x.numel()).view(p.size, -1)[p.rank])


# In all of them rank r's part of what is reduced or moved depends on r, and the root is not rank 0 where that differs.
SYMMETRIC = {
    "allreduce": lambda p: allreduce(p, p.symmetric()),
    "allreduce, the tensors elsewhere": lambda p: allreduce(p, p.symmetric(p.rank % 2)),
    "allreduce into symmetric": lambda p: allreduce_into(p, p.ordinary(1), p.symmetric()),
    "allreduce into symmetric, elsewhere": lambda p: allreduce_into(p, p.symmetric(), p.symmetric(p.rank % 2)),
    "reduce": lambda p: reduce(p, p.symmetric(), 1),
    "reduce_scatter": lambda p: reduce_scatter(p, p.symmetric()),
    "broadcast": lambda p: broadcast(p, p.symmetric(), 1),
    "allgather": lambda p: gather(p, p.symmetric(), None),
    "allgather in place": lambda p: allgather_in_place(p, p.memory.view(torch.float32)),
    "gather": lambda p: gather(p, p.symmetric(), 1),
    "alltoall": lambda p: alltoall(p, p.symmetric()),
    "scatter": lambda p: scatter(p, p.symmetric(), 1),
}


def of_ordinary(root):
    """What is called with an ordinary tensor, both ways."""
    return {
        "allreduce": allreduce,
        "reduce_scatter": reduce_scatter,
        "broadcast": lambda p, x: broadcast(p, x, root),
        "allgather": lambda p, x: gather(p, x, None),
        "gather": lambda p, x: gather(p, x, root),
        "alltoall": alltoall,
        "scatter": lambda p, x: scatter(p, x, root),
    }


STAGED = {
    f"{name}, {chunks} chunks": (lambda p, do=do, chunks=chunks: do(p, p.ordinary(chunks)))
    for name, do in (of_ordinary(0) | {"reduce": lambda p, x: reduce(p, x, 0)}).items()
    for chunks in (1, 2, 3)
}
SINGLE_COPY = {
    f"{name}, single copy": (lambda p, do=do: do(p, p.own[: 3 * p.chunk])) for name, do in of_ordinary(1).items()
}
SINGLE_COPY["allreduce into another, single copy"] = lambda p: allreduce_into(
    p, p.own[3 * p.chunk :], p.own[: 3 * p.chunk]
)
STAGED["allreduce, 5 chunks"] = lambda p: allreduce(p, p.ordinary(5))  # of two ranks three, each in two slots
STAGED["allgather, from the first"] = lambda p: small_allgather(p, 0)
STAGED["allgather, from the last"] = lambda p: small_allgather(p, p.size - 1)
VERBS = SYMMETRIC | STAGED | SINGLE_COPY


def odd_sizes(p, root):
    """No elements, one, and numbers that neither slices nor chunks divide; unequal parts."""
    for number, (call, *arguments) in enumerate(odd_calls(p, root), 100):
        p.number = number
        call(p, *arguments)


def odd_calls(p, root):
    node, memory = p.channel.keep(NodeGroup, NodeGroup), p.memory.view(torch.float32)
    node.chunk_bytes = 256
    for count in (0, 1, 127, 128, 300, 64 * p.size + 1):  # 128: what two ranks reduce at once
        yield allreduce, torch.empty(count)
        yield allreduce_into, torch.empty(count), torch.empty(count)
        yield reduce, torch.empty(count), root
        yield broadcast, torch.empty(count), root
    for counts in ([40] * p.size, [rank * 29 % 99 for rank in range(p.size)], [0] * p.size):
        for which, is_symmetric in itertools.product((None, root), (False, True)):
            yield unequal_gather, counts, which, is_symmetric
    for node.chunk_bytes in (16, 400):  # 16: fewer elements than there are ranks, one at a time
        yield reduce_scatter, torch.empty(7 * p.size)
        yield alltoall, torch.empty(7 * p.size)
        yield scatter, torch.empty(7 * p.size), root
    p.way, node.chunk_bytes = 1, 1
    for count in (1, 63, 64 * p.size + 1):
        yield allreduce, p.own[:count]
        yield allreduce_into, torch.empty(count), memory[:count]


ODD_SIZES = {
    "odd sizes": lambda p: odd_sizes(p, p.size // 2),
    "odd sizes, the last root": lambda p: odd_sizes(p, p.size - 1),
}


def record_shared(monkeypatch, size, names, *, note_fences=False, turn=0):
    """What ``size`` ranks note that call ``names[channel]`` in flavour shared: a process for each rank and channel.

    ``turn``: the number of the header that the first call takes.
    """
    ranks = Ranks()
    if note_fences:
        monkeypatch.setattr(backoff, "fence", lambda: ranks.note("fence", is_fence=True))

    def program(rank, channel):
        chunk = SLICE * size
        p = Program(rank, size, ranks.channel(channel, rank, size, chunk), Shared(), chunk)
        ranks.add_memory((channel, "own", rank), p.own)
        p.channel.keep(NodeGroup, NodeGroup).turn = turn
        for p.number, name in enumerate(names[channel]):
            p.way = int(name in SINGLE_COPY)
            (VERBS | ODD_SIZES)[name](p)

    ranks.run(monkeypatch, *(lambda r=r, c=c: program(r, c) for r in range(size) for c in names))
    return ranks.entry


def record_cudaipc(monkeypatch, size, calls):
    """What ``size`` ranks, and their streams, note that call (name, stream) one after another in flavour cudaipc."""
    ranks = Ranks()
    monkeypatch.setattr(cudaipc, "peer_events", Gpu(ranks).events)
    monkeypatch.setattr(cudaipc, "_LEAST_BYTES", 4 * PIECE)
    monkeypatch.setattr(config, "current", dataclasses.replace(config.current, gpu_scratch_bytes=4 * PIECE))

    def program(rank):
        p = Program(rank, size, ranks.channel("A", rank, size), CudaIpc({"cpu"}), PIECE // size * size)
        for p.number, (name, ranks.here.stream) in enumerate(calls):
            VERBS[name](p)

    ranks.run(monkeypatch, *(lambda r=r: program(r) for r in range(size)))
    return ranks.entry


def needed_barriers(alone, *followed):
    """(how many barriers an operation has, those without which something goes wrong), given what ranks have noted.

    First of the operation alone, then with others after it.
    """
    total = sum(step.name == "barrier" for step in alone[0])
    needed = set()
    for entry in followed:
        steps = model(entry)
        meetings = [step.name for step in entry[0] if step.barrier is not None]
        numbers = [number for number, kind in enumerate(meetings) if kind == "barrier"][:total]
        mutated = {k: without_barrier(steps, "A", numbers[k]) for k in range(total) if k not in needed}
        needed |= {k for k, each in mutated.items() if explore(each, reduced=True, hunt=True).problem}
    return total, needed
