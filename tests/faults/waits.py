"""Programs in which all ranks wait for rank 1, by the names of their waits: each is a trial.

``Wait.program`` has one place, ``FAULT``, at which rank 1 falls asleep or comes to its end; ``words`` is what the
report calls the wait.
"""

from typing import NamedTuple

HEAD = """
import os, pathlib, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
import torchmpi_py as mpi
from torchmpi_py.watch import stacks
stacks._GIVEN_WITHIN_SECONDS = 6.0  # for a busy machine
me = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)

def strike(what):
    if me == 1:
        pathlib.Path(os.environ["FAULTS_JOB"], "fault-1").write_text(str(os.getpid()))
        time.sleep(1000) if what == "sleep" else sys.exit()

"""
GROUP = """
import torch.distributed as dist
import torchmpi_py.torch_backend as backend
dist.init_process_group("torchmpi")
x = torch.full((3,), 1.0 + me)
dist.all_reduce(x)
"""
DDP = f"""
import torch._dynamo
{GROUP}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
HOOK
for number in range(4):
    if number == 3:
        FAULT
    model(torch.ones(3, 8)).sum().backward()
"""
FSDP = f"""
import torch._dynamo, torch.distributed.fsdp
{GROUP}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
mesh = init_device_mesh("cpu", (mpi.size(),))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
for number in range(4):
    if number == 3:
        FAULT
    model(torch.ones(3, 8)).sum().backward()
"""
SERVER = """
from torchmpi_py import paramserver as ps
mpi.start()
network = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.5, nesterov=True)
often = {"init_delay": 2, "update_frequency": 2}
"""
TRAINING = f"""
{SERVER}
update = MAKE
for number in range(8):
    if number == WHEN:
        FAULT
    optimizer.zero_grad()
    network(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    update.update(number)
if WHEN == 8:
    FAULT
THEN
"""
UPDATES = {
    "DownpourUpdate": "ps.DownpourUpdate(network, local_update=lambda g: g.mul_(-0.1), **often)",
    "EASGDUpdate": "ps.EASGDUpdate(network, **often)",
    "EAMSGDUpdate": "ps.EAMSGDUpdate(network, optimizer, **often)",
    "DifferenceUpdate": "ps.DifferenceUpdate(network, **often)",
    "StaleSynchronousUpdate": "ps.StaleSynchronousUpdate(network, staleness=1, init_delay=2)",
    "SynchronousUpdate": "ps.SynchronousUpdate(network, lr=0.1)",
}


class Wait(NamedTuple):
    """A program, and what its report says of the wait."""

    program: str
    words: str

    def text(self, what: str) -> str:
        """With rank 1's ``what``, "sleep" or "end", in its place."""
        return HEAD + self.program.replace("FAULT", f"strike({what!r})")


def _of_group(call: str, words: str) -> Wait:
    return Wait(f"{GROUP}\nFAULT\n{call}", words)


def _of_server(setup: str, call: str, words: str) -> Wait:
    return Wait(f"{SERVER}\n{setup}\nFAULT\n{call}", words)


def _of_update(name: str, when: int, then: str, words: str) -> Wait:
    """In the step ``when``; behind the last one, if it is 8."""
    program = TRAINING.replace("MAKE", UPDATES[name]).replace("WHEN", str(when))
    return Wait(program.replace("THEN", then and f"update.{then}"), words)


FUTURE = "dist.all_reduce(x, async_op=True).get_future()"
LAUNCHED = "mpi.allreduce_async(torch.ones(1 << 20), comm=comm, flavour='shared')"
WAITS = {
    "a future": _of_group(f"{FUTURE}.wait()", "allreduce"),
    "what is chained to a future": _of_group(f"{FUTURE}.then(lambda future: future.value()).wait()", "allreduce"),
    "futures in C++": _of_group(f"torch.futures.wait_all([{FUTURE} for _ in range(3)])", "allreduce"),
    "a future behind what nobody waits for": _of_group(
        f"dist.broadcast(x, 0, async_op=True); {FUTURE}.wait()", "allreduce .* operation is queued behind broadcast"
    ),
    "new_group": _of_group("dist.new_group()", "a new process group"),
    "init_process_group": Wait(
        GROUP.replace("dist.init_process_group", "mpi.start()\nFAULT\ndist.init_process_group"), "init_process_group"
    ),
    "DDP": Wait(DDP.replace("HOOK", ""), "allreduce"),
    "DDP with the hook": Wait(DDP.replace("HOOK", "model.register_comm_hook(None, backend.average)"), "allreduce"),
    "FSDP2": Wait(FSDP, "allgather"),
    "to make an update": _of_server("", UPDATES["DownpourUpdate"], "settings of an update"),
    "to make a synchronous update": _of_server("", UPDATES["SynchronousUpdate"], "settings of an update"),
    "to seed": _of_update("EASGDUpdate", 2, "", "paramserver.init_tensors"),
    "DownpourUpdate.take_result": _of_update("DownpourUpdate", 8, "take_result()", "DownpourUpdate.take_result"),
    "EAMSGDUpdate.take_result": _of_update("EAMSGDUpdate", 8, "take_result()", "EAMSGDUpdate.take_result"),
    "DifferenceUpdate.state_dict": _of_update("DifferenceUpdate", 8, "state_dict()", "DifferenceUpdate.state_dict"),
    "StaleSynchronousUpdate.free": _of_update("StaleSynchronousUpdate", 8, "free()", "ParameterServer.free"),
    "SynchronousUpdate.free": _of_update("SynchronousUpdate", 8, "free()", "ParameterServer.free"),
    "SynchronousUpdate.update": _of_update("SynchronousUpdate", 5, "", "SynchronousUpdate.update"),
    "StaleSynchronousUpdate.update": _of_update("StaleSynchronousUpdate", 5, "", "bounded staleness, for rank 1"),
    "EASGDUpdate.update": _of_update("EASGDUpdate", 5, "", "mpi.stop"),  # it waits for nobody
    "Hogwild, to make one": _of_server("", "ps.Hogwild(network)", "Hogwild"),
    "Hogwild.free": _of_server("shared = ps.Hogwild(network)", "shared.free()", "Hogwild.free"),
    "paramserver.init": _of_server("", "ps.init(torch.ones(9))", "paramserver.init"),
    "paramserver.init_tensors": _of_server("", "ps.init_tensors([torch.ones(9)])", "paramserver.init_tensors"),
    "paramserver.free_all": _of_server("ps.init(torch.ones(9))", "ps.free_all()", "ParameterServer.free"),
    "what is launched, in stop": _of_server("comm = mpi.split(0)", LAUNCHED, "allreduce shared"),
}
WORKING = """
server = ps.init(torch.zeros(9))
for _ in range(50 * (me == 1)):
    server.send(torch.ones(9)).wait()
    time.sleep(0.2)
server.free()
"""
PATIENT = {
    "free, of ranks that only serve": f"{SERVER}{WORKING}",
    "take_result, of fast workers": _of_update("EASGDUpdate", -1, "take_result()", "")
    .program.replace("range(8)", "range(8 + 42 * (me == 1))")
    .replace("    optimizer.zero_grad()", "    time.sleep(0.2)\n    optimizer.zero_grad()")
    .replace("FAULT", "pass"),
}
"""Programs in which rank 1 works longer than the deadline while the others wait for it, as they may."""
