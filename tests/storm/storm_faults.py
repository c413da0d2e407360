"""A fault to plant: what a storm has to find. It shows only where several things are under way."""

from torchmpi_py.collectives.flavours import node_group
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.memory import symmetric


def one_arena(patch, mpi):
    """Slots and records lie in one segment of the node for each kind of thread, as they did at first."""
    world, make = mpi.communicator(0).direct, NodeGroup.__init__
    made = [symmetric.allocate(world.mpi, world.places, 6 << 20) for _ in range(2)]

    def init(node, channel):
        make(node, channel)
        node._memory.release()
        node._mapping, segment = made[channel.thread_role]
        node._segment, node._memory = segment, memoryview(node._mapping).cast("B")
        parts = [segment.part_of[index] * segment.part_bytes for index in node._indices]
        node._headers = [[node_group._of_turn(begin, turn) for begin in parts] for turn in (0, 1)]

    patch.setattr(NodeGroup, "__init__", init)
