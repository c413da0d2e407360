"""Faults to plant, one at a time: what a storm has to find. Each is a defect that somebody could write."""

import dataclasses
import threading

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavours import single_copy, staging, two_shot
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.memory import symmetric
from torchmpi_py.memory.peer_memory import PeerMemory
from torchmpi_py.torch_backend.ddp_hook import BucketMemory
from torchmpi_py.torch_backend.work import PendingWork

_local = threading.local()


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
        node._headers = [segment.part_of[index] * segment.part_bytes for index in node._indices]

    _after_init(patch, NodeGroup, move)


def _skipping_barriers(patch):
    """A barrier of a node is left out where ``_local.skip`` says so."""

    def wrap(node, channel):
        meet = node.barrier

        def barrier():
            if not getattr(_local, "skip", False):
                meet()
            _local.skip = False

        node.barrier = barrier

    _after_init(patch, NodeGroup, wrap)


def _no_barrier_after(patch, owner, name):
    """The barrier that follows a function is left out."""
    _skipping_barriers(patch)
    former = getattr(owner, name)

    def run(*args):
        result = former(*args)
        _local.skip = result is not False  # for there work goes on in another way
        return result

    patch.setattr(owner, name, run)


def no_closing_barrier(patch, mpi):
    """Work on symmetric tensors ends without a barrier."""
    _no_barrier_after(patch, two_shot, "carry_out")


def no_meeting(patch, mpi):
    """Ranks read each other's records without having met."""
    _skipping_barriers(patch)
    former = NodeGroup.announce

    def announce(self, record):
        _local.skip = True
        return former(self, record)

    patch.setattr(NodeGroup, "announce", announce)


def no_barrier_in_the_pipeline(patch, mpi):
    """One barrier of a pipeline is missing."""
    former = staging.pipeline

    def pipeline(num_chunks, stages, meet):
        count = iter(range(1 << 30))
        former(num_chunks, stages, lambda: None if next(count) == 1 else meet())

    patch.setattr(staging, "pipeline", pipeline)


def _one_slot(patch, name):
    former = getattr(NodeGroup, name)
    patch.setattr(NodeGroup, name, lambda self, rank, chunk, *rest: former(self, rank, 0, *rest))


def slot_used_twice(patch, mpi):
    """The slot of a chunk is that of the next."""
    _one_slot(patch, "given")


def result_slot_used_twice(patch, mpi):
    """The same, of what was reduced."""
    _one_slot(patch, "reduced")


def stale_plan(patch, mpi):
    """What was prepared for a tensor is taken for another one of the same size."""

    class Stale(dict):
        def get(self, key, default=None):
            return super().get((key[0], key[1], key[3]), default)

        def __setitem__(self, key, value):
            super().__setitem__((key[0], key[1], key[3]), value)

    _after_init(patch, NodeGroup, lambda node, channel: setattr(node, "prepared", Stale()))


def wrong_owner(patch, mpi):
    """Rank 1 reduces the slice of rank 0."""
    former = two_shot.slices

    def slices(count, size):
        bounds = former(count, size)
        return bounds[:1] * min(2, size) + bounds[2:]

    patch.setattr(two_shot, "slices", slices)


def lost_element(patch, mpi):
    """The last element of many chunks is left out."""
    former = staging.chunks
    patch.setattr(staging, "chunks", lambda begin, end, step: former(begin, end - (end > 2 * step), step))


def no_barrier_at_once(patch, mpi):
    """The next values come into slots that the other rank may still read."""
    _no_barrier_after(patch, staging, "allreduce_at_once")


def no_barrier_between_shots(patch, mpi):
    """Results are read from peers that may not have them yet."""
    _no_barrier_after(patch, single_copy, "_reduce")


def read_of_another(patch, mpi):
    """What lies at an address is read from another rank, if there is one."""
    former = PeerMemory.read

    def read(self, rank, address, into):
        former(self, rank + 1 if rank + 1 < len(self._pids) else 0, address, into)

    patch.setattr(PeerMemory, "read", read)


def queue_out_of_order(patch, mpi):
    """Rank 0 carries out the second of two queued operations first, now and then."""
    if mpi.rank() != 0:
        return
    former = CommunicationThread._loop

    def loop(self):
        take = self._queue.get

        class Swapped:
            put, later = self._queue.put, []

            def get(self):
                first = self.later.pop() if self.later else take()
                if first is not None and not CommunicationThread_queue.empty():
                    second = take()
                    self.later.append(first if second is not None else second)
                    return second if second is not None else first
                return first

        CommunicationThread_queue = self._queue
        self._queue = Swapped()
        former(self)

    patch.setattr(CommunicationThread, "_loop", loop)


def one_communicator(patch, mpi):
    """Both threads use one communicator of MPI."""

    def join(comm, *args):
        comm.background.mpi = comm.direct.mpi

    _after_init(patch, Communicator, join)


def one_bucket(patch, mpi):
    """Buckets of the same size are taken for the same, whatever their group."""
    made = {}
    keep = BucketMemory.keep

    def find(self, parameters, x):
        return made.get((x.numel(), x.dtype))

    def kept(self, parameters, memory):
        keep(self, parameters, memory)
        if memory is not None:
            made[memory.numel(), memory.dtype] = _Kept(memory)

    patch.setattr(BucketMemory, "find", find)
    patch.setattr(BucketMemory, "keep", kept)


@dataclasses.dataclass
class _Kept:
    memory: object


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


FAULTS = {
    fault.__name__: fault
    for fault in (
        one_arena,
        no_closing_barrier,
        no_meeting,
        no_barrier_in_the_pipeline,
        slot_used_twice,
        result_slot_used_twice,
        stale_plan,
        wrong_owner,
        lost_element,
        no_barrier_at_once,
        no_barrier_between_shots,
        read_of_another,
        queue_out_of_order,
        one_communicator,
        one_bucket,
        no_wait,
        one_scratch,
    )
}
