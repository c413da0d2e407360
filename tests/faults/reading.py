"""A rank is killed in the last barrier of a gather, while another rank has still to read its tensor."""

import os
import signal
import threading
import time

import torch

import torchmpi_py as mpi
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.collectives.flavours.trials import Trials
from torchmpi_py.memory.peer_memory import PeerMemory

VICTIM = 2
Trials.run = lambda self, key, num_bytes, ways: ways[-1]()
mpi.start()
me, count = mpi.rank(), 1 << 20
x = torch.arange(count) + me
mpi.allgather(x, flavour="shared")  # all is made, and all have met

if me == 0:
    former = PeerMemory.read

    def read(self, rank, address, into):
        time.sleep(1.5 if rank == VICTIM else 0)
        former(self, rank, address, into)

    PeerMemory.read = read
if me == VICTIM:
    node, meetings = mpi.communicator(0).direct.keep(NodeGroup, NodeGroup), [0]
    meet = node.barrier

    def barrier():
        meetings[0] += 1
        if meetings[0] == 2:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        meet()

    node.barrier = barrier
try:
    out = mpi.allgather(x, flavour="shared")
    is_right = torch.equal(out, torch.cat([torch.arange(count) + rank for rank in range(mpi.size())]))
    print(f"rank {me}: {'right' if is_right else 'WRONG'}", flush=True)
except mpi.errors.RankDied as error:
    print(f"rank {me}: RankDied, {error}", flush=True)
time.sleep(0 if me == 0 else 10)  # the job ends with rank 0
os._exit(1)
