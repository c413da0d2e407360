"""Faults to plant, one at a time: what a storm has to find. Each shows only where several things are under way.

Barriers that are missing are left to ``tests/collectives/test_protocol_model.py``, which leaves out each.
"""

import dataclasses

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavours import node_group
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.collectives.flavours.prepared_allreduce import PreparedAllreduce
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.memory import symmetric
from torchmpi_py.torch_backend import ddp_buckets
from torchmpi_py.torch_backend.work import PendingWork


def _after_init(patch, owner, step):
    make = owner.__init__

    def init(self, *args, **kwargs):
        make(self, *args, **kwargs)
        step(self, *args, **kwargs)

    patch.setattr(owner, "__init__", init)


def one_arena(patch, mpi):
    """Slots and records lie in one segment of the node for each kind of thread, as they did at first."""
    world = mpi.communicator(0).direct
    made = [symmetric.allocate(world.mpi, world.places, 6 << 20) for _ in range(2)]

    def move(node, channel):
        node._memory.release()
        node._mapping, segment = made[channel.thread_role]
        node._segment, node._memory = segment, memoryview(node._mapping).cast("B")
        parts = [segment.part_of[index] * segment.part_bytes for index in node._indices]
        node._headers = [[node_group._of_turn(begin, turn) for begin in parts] for turn in (0, 1)]

    _after_init(patch, NodeGroup, move)


def slot_used_twice(patch, mpi):
    """The slot of a chunk is that of the next."""
    former = NodeGroup.given
    patch.setattr(NodeGroup, "given", lambda self, rank, chunk, *rest: former(self, rank, 0, *rest))


def stale_plan(patch, mpi):
    """What was prepared for a tensor is taken for another one of the same size."""

    class Stale(dict):
        def get(self, address, default=None):
            return next(iter(self.values()), default)

    _after_init(patch, PreparedAllreduce, lambda prepared, *_: setattr(prepared, "_in_place", Stale()))


def one_communicator(patch, mpi):
    """Both threads use one communicator of MPI."""

    def join(comm, *args):
        comm.background.mpi = comm.direct.mpi

    _after_init(patch, Communicator, join)


def one_bucket(patch, mpi):
    """Buckets of the same size are taken for the same, whatever their group."""
    former, made = ddp_buckets._memory, {}

    def memory(group, parameters, x):
        key = x.numel(), x.dtype
        if key not in made:
            made[key] = former(group, parameters, x)
        return made[key]

    patch.setattr(ddp_buckets, "_memory", memory)


def no_wait(patch, mpi):
    """Every fifth call of torch.distributed is taken for complete."""
    former = PendingWork.wait
    calls = iter(range(1 << 30))
    patch.setattr(PendingWork, "wait", lambda self, timeout=None: next(calls) % 5 == 4 or former(self, timeout))


def one_scratch(patch, mpi):
    """Scratch for 16-bit floats is the same for all threads."""
    former, rooms = mpi_buffers.reduction, {}

    def reduction(dtype, op):
        how = former(dtype, op)
        if how.encode is None:
            return how

        def encode(x):
            made = how.encode(x)
            room = rooms.get(made.dtype)
            if room is None or room.numel() < made.numel():
                room = rooms[made.dtype] = made.new_empty(made.numel())
            return room[: made.numel()].copy_(made.view(-1))

        return dataclasses.replace(how, encode=encode)

    patch.setattr(mpi_buffers, "reduction", reduction)


_ALL = (one_arena, slot_used_twice, stale_plan, one_communicator, one_bucket, no_wait, one_scratch)
FAULTS = {fault.__name__: fault for fault in _ALL}
