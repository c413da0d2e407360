"""Programs of ranks that hold shared memory, and write down which: other jobs of this machine have files there, too."""

START = """
import os, signal, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
rank, window = world.rank, MPI.Win.Allocate_shared(1 << 20, comm=world)
world.Barrier()
with open("/proc/self/maps") as maps, open(f"{os.environ['LAUNCH_TEST']}/held-{os.getpid()}", "w") as held:
    held.writelines(line for line in maps if " /dev/shm/" in line)
world.Barrier()
"""
# All do what argv[1] says, and then wait for each other.
MEET = f"""
{START}
exec(sys.argv[1])
world.Barrier()
window.Free()
"""
