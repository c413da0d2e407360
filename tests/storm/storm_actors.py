"""Actors at work: each carries out its steps on one rank, and says which results are wrong."""

import itertools

import storm_values as values
import torch
import torch.distributed as dist
from storm_draw import BY_ROWS
from torch import nn

from torchmpi_py.collectives import registry

POOL_BYTES = 12 << 20
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older names
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": "SUM", "max": "MAX", "min": "MIN", "avg": "AVG"}


class Group:
    """A group that this rank belongs to: of ``mpi`` (a communicator) or of torch.distributed; and symmetric memory."""

    def __init__(self, mpi, handle, comm):
        self.handle, self.rank, self.size = handle, comm.rank, comm.size
        self.pool = mpi.symmetric_empty(POOL_BYTES, dtype=torch.uint8, comm=comm)
        self.used = 0

    def place(self, x, room_bytes, number):
        """``x``, or its values in symmetric memory, if that has room; not always at the same place there.

        Symmetric on all ranks or on none: ``room_bytes`` is the same on all, and room is given back after a round,
        for ranks wait for calls at different times.
        """
        begin = -(-self.used // 64) * 64 + number % 13 * 64
        if not room_bytes or begin + room_bytes > POOL_BYTES:
            return x
        self.used = begin + room_bytes
        return self.pool[begin : begin + x.nbytes].view(x.dtype).copy_(x)


class Call:
    """A step on this rank: its tensors, and what they must be afterwards."""

    def __init__(self, step, group):
        self.step, self.group = step, group
        self.dtype = getattr(torch, step.dtype)
        count = step.count + (group.rank if step.uneven else 0)
        if step.verb in BY_ROWS:
            count *= group.size
        self.count = count
        num_rows = group.size if step.verb in BY_ROWS else 1
        room_bytes = (step.count + group.size) * num_rows * self.dtype.itemsize if step.symmetric else 0
        self.x = group.place(self._given(group.rank), room_bytes, step.number)
        out = None
        if step.out or (step.verb == "alltoall"):
            out = group.place(torch.full((count,), 7).to(self.dtype), room_bytes, step.number)
        self.out = out

    def _given(self, rank):
        count = self.count
        if self.step.uneven:
            count += rank - self.group.rank
        return values.given(rank, self.step.number, count, self.dtype, self.step.op)

    def _slice(self, x, rank):
        return x[rank * self.step.count : (rank + 1) * self.step.count]

    def expected(self):
        """(of the result, or None; of ``x``, or None where that is the result)."""
        step, me, size = self.step, self.group.rank, self.group.size
        if step.verb in ("allreduce", "reduce", "reduce_scatter"):
            total = values.reduced(size, step.number, self.count, self.dtype, step.op)
            if step.verb == "reduce":
                return (total, None) if me == step.root else (None, self._given(me))
            if step.verb == "reduce_scatter":
                return self._slice(total, me), self._given(me)
            return total, self._given(me) if step.out else None
        if step.verb == "broadcast":
            return self._given(step.root), None
        if step.verb == "sendreceive":
            return self._given((me - 1) % size), None
        if step.verb == "scatter":
            return self._slice(self._given(step.root), me), None
        if step.verb == "alltoall":
            return torch.cat([self._slice(self._given(rank), me) for rank in range(size)]), self._given(me)
        whole = torch.cat([self._given(rank) for rank in range(size)])
        return (whole if step.verb == "allgather" or me == step.root else None), self._given(me)

    def check(self, result):
        """What is wrong."""
        expected, of_x = self.expected()
        told = "" if expected is None else values.difference(result, expected)
        if not told and of_x is not None and (told := values.difference(self.x, of_x)):
            told = f"the input: {told}"
        return told and f"rank {self.group.rank} of {self.group.size}, {self.step}: {told}"

    def mpi(self, mpi):
        """Call the verb; (handle or None, result)."""
        step, name = self.step, self.step.verb + "_async" * self.step.is_async
        comm, flavour = self.group.handle, step.flavour
        if flavour and registry.status(registry.BY_NAME[flavour], step.verb, "cpu", comm) != "available":
            flavour = None
        options = {"comm": comm, "flavour": flavour}
        arguments = [self.x]
        if step.verb in ("broadcast", "reduce", "gather", "scatter"):
            arguments.append(step.root)
        if step.verb == "sendreceive":
            arguments += [(self.group.rank - 1) % self.group.size, (self.group.rank + 1) % self.group.size]
        if step.verb in ("allreduce", "reduce", "reduce_scatter"):
            options["op"] = step.op
        if self.out is not None:
            options["out"] = self.out
        made = getattr(mpi, name)(*arguments, **options)
        return (made, None) if step.is_async else (None, made)

    def dist(self):
        """Call it by torch.distributed; (work or None, result)."""
        step, pg = self.step, self.group.handle
        op = getattr(dist.ReduceOp, _OPS[step.op])
        options = {"group": pg, "async_op": step.is_async}
        root = {"group_src" if step.verb == "broadcast" else "group_dst": step.root}
        x, result = self.x, self.x
        if step.verb == "allreduce":
            if self.out is not None:
                result = x = self.out.copy_(x)
            work = dist.all_reduce(x, op, **options)
        elif step.verb == "broadcast":
            work = dist.broadcast(x, **root, **options)
        elif step.verb == "reduce":
            work = dist.reduce(x, op=op, **root, **options)
        elif step.verb == "allgather":
            result = x.new_empty(self.group.size * self.count)
            work = all_gather(result, x, **options)
        elif step.verb == "reduce_scatter":
            result = x.new_empty(step.count)
            work = reduce_scatter(result, x, op, **options)
        else:
            result = self.out
            work = dist.all_to_all_single(result, x, **options)
        return work, result


def _batches(steps):
    """Steps that are launched one after another, without waiting."""
    batch = []
    for step in steps:
        batch.append(step)
        if step.waits or not step.is_async:
            yield batch
            batch = []
    if batch:
        yield batch


def calls(actor, groups, mpi, wrong):
    """Carry out calls of ``mpi``, or of torch.distributed."""
    mine = [step for step in actor.steps if step.group in groups]
    for step in mine:
        groups[step.group].used = 0
    is_dist = actor.kind == "dist"
    for batch in _batches(mine):
        under_way = []
        if is_dist and mpi.communicator(0).rank % 2 and all(step.is_async for step in batch):
            batch.sort(key=lambda step: -step.group)  # within a group the order stays
        for step in batch:
            call = Call(step, groups[step.group])
            handle, result = call.dist() if is_dist else call.mpi(mpi)
            under_way.append((call, handle, result))
        for call, handle, result in under_way:
            waited = handle.wait() if handle is not None else None
            if told := call.check(result if is_dist or handle is None else waited):
                wrong.append(told)


class Net(nn.Module):
    """A network whose gradients, in step k, are values of the rank: the sum of parameters times them."""

    def __init__(self, sizes, rank, number):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self.rank, self.number = rank, number

    def factors(self, step, rank):
        return [values.given(rank, self.number + 10 * step + i, len(p), op="avg") for i, p in enumerate(self.weights)]

    def average(self, step, size):
        return [values.reduced(size, self.number + 10 * step + i, len(p), op="avg") for i, p in enumerate(self.weights)]

    def forward(self, x):
        step = int(x.reshape(-1)[0])
        return sum((p * factor).sum() for p, factor in zip(self.weights, self.factors(step, self.rank), strict=True))


def ddp(actor, groups, wrong):
    """Train under DistributedDataParallel."""
    from torchmpi_py.torch_backend import average

    group = groups.get(actor.steps[0].group)
    if group is None:
        return
    net = Net(actor.sizes, group.rank, actor.steps[0].number)
    model = nn.parallel.DistributedDataParallel(net, process_group=group.handle, bucket_cap_mb=4)
    if actor.option:
        model.register_comm_hook(group.handle, average)
    for k, step in enumerate(actor.steps):
        model.zero_grad()
        model(torch.tensor([k])).backward()
        for i, (p, expected) in enumerate(zip(net.weights, net.average(k, group.size), strict=True)):
            if told := values.difference(p.grad, expected):
                wrong.append(f"rank {group.rank} of {group.size}, ddp, {step}, gradient {i}: {told}")


def engine(actor, mpi, wrong):
    """Train with AllReduceSGDEngine."""
    from torchmpi_py.engine import AllReduceSGDEngine

    rank, size = mpi.rank(), mpi.size()
    net = Net(actor.sizes, rank, actor.steps[0].number)
    samples = [(torch.tensor([[k, rank]]), torch.zeros(1)) for k in range(len(actor.steps))]
    made = AllReduceSGDEngine(asynchronous=actor.option)
    made.train(network=net, criterion=lambda output, _: output, iterator=samples, lr=1.0, maxepoch=1)
    sums = [-sum(each) for each in zip(*(net.average(k, size) for k in range(len(actor.steps))), strict=True)]
    for i, (p, expected) in enumerate(zip(net.weights, sums, strict=True)):
        if told := values.difference(p.detach(), expected):
            wrong.append(f"rank {rank} of {size}, engine, {len(actor.steps)} steps, weight {i}: {told}")


def run(actor, groups, mpi, wrong):
    """Carry an actor out on this rank."""
    if actor.kind == "engine":
        engine(actor, mpi, wrong)
    elif actor.kind == "ddp":
        ddp(actor, groups["dist"], wrong)
    else:
        calls(actor, groups["dist" if actor.kind == "dist" else "mpi"], mpi, wrong)


def operations(actors):
    """How many calls and training steps there are."""
    return len(list(itertools.chain(*(actor.steps for actor in actors))))
