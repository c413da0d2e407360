"""A trial with a parameter server, each rank on a node of its own: a rank injects its fault in the service thread."""

import threading

import striking
from striking import hold, me, strike_at

strike_at("before start")
import torch  # noqa: E402

import torchmpi_py as mpi  # noqa: E402
from torchmpi_py import paramserver as ps  # noqa: E402
from torchmpi_py.core import communicators  # noqa: E402
from torchmpi_py.core.channels import Place  # noqa: E402


def rule(shard, payload):
    if threading.current_thread() is not threading.main_thread():
        strike_at("service thread")
    shard.add_(payload)


mpi.start()
hold()
ps.register_rule("faulty", rule)
world = communicators.communicator(0).direct.mpi
comm = communicators.Communicator(world.Dup(), Place(world.rank, 0), "nodes of one rank")
server = ps.init(torch.zeros(4 * mpi.size()), comm=comm)
for number in range(200):
    striking.step = number
    server.send(torch.ones(4 * mpi.size()), "faulty").wait()
mpi.barrier()
if me == 0:
    print("all done", flush=True)
server.free()
comm.free()
mpi.stop()
