"""Ranks that die while the others take the state of the one that has come farthest (torchmpirun --elastic)."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(240)

CATCH_UP = """
import os, signal
import torch
import torchmpi_py as mpi

class Step(int):
    def __ne__(self, other):  # asked when the states have gone out
        if is_farthest:
            os.kill(os.getpid(), signal.SIGKILL)
        return int(self) != int(other)

mpi.start()
is_farthest = mpi.rank() == 1
network = torch.nn.Linear(1, 1)
torch.nn.init.constant_(network.weight, mpi.rank())
step = mpi.catch_up(Step(5) if is_farthest else Step(4), network)
print(f"size {mpi.size()} step {step} weight {network.weight.item()}", flush=True)
mpi.stop()
"""

# Rank 2 dies in a hook which rank 1 cannot complete then: rank 0 is a step ahead. It dies when it has given its state.
ENGINE = """
import os, signal
import torch
import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator
from torchmpi_py.runtime import survivors

catch_up, rank = survivors.catch_up, 0

def caught_up(*arguments):
    farthest = catch_up(*arguments)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return farthest

def on_update(state):
    schedule.step()
    if state.t == 3 and rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)

def on_backward(state):
    if state.t == 2 and rank in (1, 3):
        mpi.barrier(comm=others)  # until rank 2 is dead

def on_recovery(state):
    rates = state.optimizer.param_groups[0]["lr"], schedule.get_last_lr()[0]
    print(f"size {mpi.size()} t {state.t} position {state.position} calls {schedule.last_epoch} {rates}", flush=True)

mpi.start()
rank = mpi.rank()
others = mpi.split(int(rank > 0))
survivors.catch_up = caught_up
engine = AllReduceSGDEngine()
engine.hooks.on_backward, engine.hooks.on_update, engine.hooks.on_recovery = on_backward, on_update, on_recovery
data = torch.utils.data.TensorDataset(torch.ones(48, 1), torch.ones(48, 1))
network = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(network.parameters(), 0.5)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=DatasetIterator(data, 2), optimizer=optimizer,
             checkpoint=CHECKPOINT, stateful={"schedule": schedule})
mpi.nn.check_with_allreduce(network)
mpi.stop()
"""

# Rank 2 dies at the end of an epoch, where rank 1 waits for it, and rank 0 has made the step of the schedule.
END_OF_EPOCH = """
import os, signal
import torch
import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

def on_end_epoch(state):
    if state.epoch == 1 and mpi.size() == 3:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            mpi.barrier(comm=others)
    STEP
        schedule.step()

mpi.start()
rank = mpi.rank()
others = mpi.split(int(rank > 0))
engine = AllReduceSGDEngine()
engine.hooks.on_end_epoch = on_end_epoch
data = torch.utils.data.TensorDataset(torch.ones(48, 1), torch.ones(48, 1))
network = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(network.parameters(), 0.5)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=DatasetIterator(data, 2), optimizer=optimizer,
             maxepoch=2, checkpoint=CHECKPOINT, stateful={"schedule": schedule})
mpi.nn.check_with_allreduce(network)
print(f"size {mpi.size()} calls {schedule.last_epoch} {optimizer.param_groups[0]['lr']}", flush=True)
mpi.stop()
"""


def lines(folder, program, ranks):
    (folder / "program.py").write_text(program)
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", str(ranks), "--bind", "none", "--timeout", "150"]
    job = subprocess.run([*launch, "--elastic", folder / "program.py"], capture_output=True, text=True, timeout=200)
    assert job.returncode == 0, job.stderr
    return [line for line in job.stdout.splitlines() if line.startswith("size")]


def test_the_farthest_rank_dies_after_giving_its_state(tmp_path):
    assert lines(tmp_path, CATCH_UP, 3) == ["size 2 step 5 weight 1.0"] * 2


def test_the_engine_stands_where_the_farthest_rank_stood(tmp_path):
    program = ENGINE.replace("CHECKPOINT", repr(str(tmp_path / "checkpoints")))
    assert lines(tmp_path, program, 4) == ["size 2 t 3 position 24 calls 3 (0.0625, 0.0625)"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "calls"),
    [
        ("while schedule.last_epoch < state.epoch:", 2),
        ("for _ in range(1):", 3),  # it is called again
    ],
)
def test_a_schedule_of_which_some_ranks_have_made_the_step(tmp_path, step, calls):
    program = END_OF_EPOCH.replace("CHECKPOINT", repr(str(tmp_path / "checkpoints"))).replace("STEP", step)
    assert lines(tmp_path, program, 3) == [f"size 2 calls {calls} {0.5 ** (calls + 1)}"] * 2
