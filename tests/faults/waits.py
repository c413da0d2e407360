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
{GROUP}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
HOOK
def step():
    model(torch.ones(3, 8)).sum().backward()
for _ in range(3):
    step()
FAULT
step()
"""
FSDP = f"""
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
LIGHTNING = """
import lightning, logging
from lightning.pytorch.strategies import DDPStrategy
from torchmpi_py import torch_backend
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
mpi.start()

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(8, 4)

    def training_step(self, batch, number):
        if number == 4:
            FAULT
        return self.network(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Hook(lightning.Callback):
    def on_train_start(self, trainer, module):
        HOOK

quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False)
strategy = DDPStrategy(process_group_backend="torchmpi")
trainer = lightning.Trainer(
    accelerator="cpu", devices=mpi.local_size(), strategy=strategy, max_epochs=1, callbacks=[Hook()], **quiet
)
rows = torch.utils.data.TensorDataset(torch.ones(60, 8))
trainer.fit(Module(), torch.utils.data.DataLoader(rows, 2))
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
AVERAGE = "model.register_comm_hook(None, backend.average)"


class Wait(NamedTuple):
    """A program, and what its report says of the wait."""

    program: str
    words: str

    def text(self, what: str) -> str:
        """With rank 1's ``what``, "sleep" or "end", in its place."""
        return HEAD + self.program.replace("FAULT", f"strike({what!r})")


def _groups() -> dict[str, Wait]:
    after = {
        "a future": ("dist.all_reduce(x, async_op=True).get_future().wait()", "allreduce"),
        "what is chained to a future": (
            "dist.all_reduce(x, async_op=True).get_future().then(lambda future: future.value()).wait()",
            "allreduce",
        ),
        "futures in C++": (
            "torch.futures.wait_all([dist.all_reduce(x, async_op=True).get_future() for _ in range(3)])",
            "allreduce",
        ),
        "a future behind what nobody waits for": (
            "dist.broadcast(x, 0, async_op=True); dist.all_reduce(x, async_op=True).get_future().wait()",
            "allreduce .* before it comes broadcast",
        ),
        "new_group": ("dist.new_group()", "a new process group"),
        "monitored_barrier": ("backend.monitored_barrier()", "monitored_barrier"),
    }
    waits = {name: Wait(f"{GROUP}\nFAULT\n{call}", words) for name, (call, words) in after.items()}
    for name, hook in (("", "pass"), (" with the hook", AVERAGE)):
        waits[f"DDP{name}"] = Wait(DDP.replace("HOOK", hook), "allreduce")
        lightning_hook = hook.replace("model", "trainer.strategy.model").replace("backend.", "torch_backend.")
        waits[f"Lightning{name}"] = Wait(LIGHTNING.replace("HOOK", lightning_hook), "allreduce")
    waits["FSDP2"] = Wait(FSDP, "allgather")
    begin = GROUP.replace("dist.init_process_group", "mpi.start()\nFAULT\ndist.init_process_group")
    waits["init_process_group"] = Wait(begin, "init_process_group")
    return waits


def _updates() -> dict[str, Wait]:
    waits = {}
    for name, make in UPDATES.items():
        waits[f"{name}, to make one"] = Wait(f"{SERVER}\nFAULT\n{make}", "settings of an update")
        training = TRAINING.replace("MAKE", make)
        if name != "SynchronousUpdate":
            seed = training.replace("WHEN", "2").replace("THEN", "")
            waits[f"{name}, to seed"] = Wait(seed, "paramserver.init_tensors")
            for call in ("take_result", "state_dict"):
                program = training.replace("WHEN", "8").replace("THEN", f"update.{call}()")
                waits[f"{name}.{call}"] = Wait(program, f"{name}.{call}")
        program = training.replace("WHEN", "8").replace("THEN", "update.free()")
        waits[f"{name}.free"] = Wait(program, "ParameterServer.free")
        step = training.replace("WHEN", "5").replace("THEN", "")
        words = {
            "SynchronousUpdate": "SynchronousUpdate.update",
            "StaleSynchronousUpdate": "bounded staleness, for rank 1",
        }.get(name, "mpi.stop")  # asynchronous ones wait for nobody
        waits[f"{name}.update"] = Wait(step, words)
    return waits


def _others() -> dict[str, Wait]:
    calls = {
        "Hogwild, to make one": ("", "ps.Hogwild(network)", "Hogwild"),
        "Hogwild.free": ("shared = ps.Hogwild(network)", "shared.free()", "Hogwild.free"),
        "paramserver.init": ("", "ps.init(torch.ones(9))", "paramserver.init"),
        "paramserver.init_tensors": ("", "ps.init_tensors([torch.ones(9)])", "paramserver.init_tensors"),
        "paramserver.free_all": ("ps.init(torch.ones(9))", "ps.free_all()", "ParameterServer.free"),
        "what is launched, in stop": (
            "comm = mpi.split(0)",
            "mpi.allreduce_async(torch.ones(1 << 20), comm=comm, flavour='shared')",
            "allreduce shared",
        ),
    }
    return {name: Wait(f"{SERVER}\n{setup}\nFAULT\n{call}", words) for name, (setup, call, words) in calls.items()}


WAITS = _groups() | _updates() | _others()
WORKING = """
server = ps.init(torch.zeros(9))
for _ in range(50 * (me == 1)):
    server.send(torch.ones(9)).wait()
    time.sleep(0.2)
server.free()
"""
PATIENT = {
    "free, of ranks that only serve": f"{SERVER}{WORKING}",
    "take_result, of fast workers": TRAINING.replace("MAKE", UPDATES["EASGDUpdate"])
    .replace("WHEN", "-1")
    .replace("range(8)", "range(8 + 42 * (me == 1))")
    .replace("    optimizer.zero_grad()", "    time.sleep(0.2)\n    optimizer.zero_grad()")
    .replace("THEN", "update.take_result()")
    .replace("FAULT", "pass"),
}
"""Programs in which rank 1 works longer than the deadline while the others wait for it, as they may."""
