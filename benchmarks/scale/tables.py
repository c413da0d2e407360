"""The tables that one rank of a large job keeps: bytes received, seconds to fill them, and memory that stays.

``python benchmarks/scale/tables.py 512 64`` prints them for 512 nodes of 64 ranks. It fills the tables as rank 0 does,
in one process: a stand-in for MPI answers with the rows of all ranks, so the times are without MPI's part.
"""

import sys
import time
import tracemalloc
from unittest import mock

import numpy as np

import torchmpi_py as mpi
from torchmpi_py.core import communicators
from torchmpi_py.core.channels import Place
from torchmpi_py.memory import gpus
from torchmpi_py.watch import node_links


class Group(mock.MagicMock):
    """MPI's part: what rank 0 would receive."""

    def Allgather(self, mine, table):  # noqa: N802 - mpi4py's name
        table[:] = self.rows
        table[0] = mine
        type(self).num_bytes = table.nbytes


def timed(what, call):
    """Print the memory of what ``call`` returns and the time of a second call, and return the first result."""
    tracemalloc.start()
    kept = call()
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    begin = time.perf_counter()
    call()
    print(f"{what}: {(time.perf_counter() - begin) * 1e3:.0f} ms, {megabytes:.1f} MB stay")
    return kept


def main(num_nodes=512, num_local=64):
    """Fill the tables of a communicator, of the watch, and of the GPUs (16 to a node)."""
    size = num_nodes * num_local
    mpi.start()  # alone, for the board of this rank
    ranks = np.arange(size)
    group = Group(rank=0, size=size)
    group.rows = np.stack([ranks - ranks % num_local, ranks % num_local, ranks, *[np.ones(size)] * 4], axis=1)
    world = timed("a communicator", lambda: communicators.Communicator(group, Place(0, 0), "all"))
    print(f"bytes that a rank receives for it: {group.num_bytes / 1e6:.1f} MB")
    world.direct.mpi.allgather.side_effect = lambda mine: [mine] * size
    with mock.patch.object(node_links, "_listen"):
        timed("the table of the watch's nodes", lambda: node_links.introduce(world.direct, "127.0.0.1"))
    reached = [frozenset(f"GPU {node}.{local}" for local in range(16)) for node in range(num_nodes)]
    places = [Place(node, local) for node in range(num_nodes) for local in range(16)]
    offers = [gpus.GpuOffer(each, f"GPU {each.node}.{each.local}", reached[each.node]) for each in places]
    timed(f"groups of GPUs: {len(offers)} ranks", lambda: gpus.ipc_groups(offers))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
