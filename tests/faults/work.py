"""The program of a trial: one operation again and again, until a rank injects a fault (``striking.py``).

``flavour``, ``verb``, ``form``, ``bytes``, ``memory``, ``nodes``, ``pause_seconds`` and ``operations`` choose the
operation. Every result is checked; a wrong one is printed to standard output, with the word WRONG.
"""

import time

import striking
from striking import before, fault, hold, me, meet, plan, strike_at, strike_later


def patch_in():
    """The points of injection inside the package."""
    from torchmpi_py.collectives import plan as plans
    from torchmpi_py.collectives.flavours import node_group, two_shot
    from torchmpi_py.collectives.reductions import Kernel
    from torchmpi_py.core import handles
    from torchmpi_py.runtime import exits

    before(two_shot, "carry_out", "two shots")
    before(Kernel, "reduce", "kernel", after=True)
    before(handles.ThreadHandle, "_run", "communication thread")
    before(plans.Plan, "run", "in the operation")
    before(exits, "wait_for_all", "stop")
    before(exits, "wait_for_all", "stop after meeting", after=True)
    real = node_group.NodeGroup.__init__

    def init(group, channel):
        real(group, channel)
        before(group, "barrier", "before a barrier", skip=fault.get("skip", 0))
        before(group, "barrier", "after a barrier", skip=fault.get("skip", 0), after=True)

    node_group.NodeGroup.__init__ = init


def prepare(mpi):
    """Make the flavours of GPUs serve the host, and the communicator that is wanted."""
    from torchmpi_py.collectives import registry
    from torchmpi_py.core import communicators
    from torchmpi_py.core.channels import Place

    for name in ("staged", "cudaipc"):
        registry.BY_NAME[name].devices = frozenset({"cpu", "cuda"})
    if plan["flavour"] == "hierarchical":
        mpi.set_collective_span(0, mpi.push_communicator(mpi.rank() % 2))
    if plan.get("nodes") == 2:
        world = communicators.communicator(0).direct.mpi
        return communicators.Communicator(world.Dup(), Place(world.rank % 2, world.rank // 2), "as if on two nodes")
    return None


def expected(torch, verb, base, size):
    """The result in closed form, where each rank has ``base`` and its number; None where there is none."""
    ranks, part = size * (size - 1) // 2, base.view(size, -1)[me]
    if verb == "reduce" and me > 0:
        return None
    return {
        "allreduce": lambda: base * size + ranks,
        "reduce": lambda: base * size + ranks,
        "broadcast": lambda: base,
        "allgather": lambda: torch.cat([base + rank for rank in range(size)]),
        "alltoall": lambda: torch.cat([part + rank for rank in range(size)]),
        "reduce_scatter": lambda: part * size + ranks,
    }[verb]()


def main():
    strike_at("before start")
    import torch

    import torchmpi_py as mpi

    patch_in()
    meet()
    mpi.start()
    comm, size = prepare(mpi), mpi.size()
    flavour, verb = plan["flavour"] or None, plan["verb"]
    count = max(size, plan["bytes"] // 4) // size * size
    x = mpi.symmetric_empty(count) if plan["memory"] == "symmetric" else torch.empty(count)
    j = torch.arange(count) % 5
    hold()
    for number in range(plan["operations"]):
        striking.step = number
        x.copy_(j + me + number % 3)
        args = (0,) if verb in ("broadcast", "reduce") else ()
        strike_at("between")
        if striking.is_victim and fault["where"] == "a random moment" and number == fault["at"]:
            strike_later(fault["delay_seconds"])  # in the middle of an operation, most likely
        call = getattr(mpi, verb + ("_async" if plan["form"] == "async" else ""))
        result = call(x, *args, comm=comm, flavour=flavour)
        if plan["form"] == "async":
            strike_at("before waiting")
            result = result.wait()
        right = expected(torch, verb, j + number % 3, size)
        if right is not None and not torch.equal(result, right.float()):
            print(f"WRONG: {verb} number {number} on rank {me}", flush=True)
        if number == 0:
            hold()
        if plan["pause_seconds"]:
            time.sleep(plan["pause_seconds"])
    if me == 0:
        print("all done", flush=True)
    mpi.stop()
    strike_at("after stop")


main()
