"""Ranks that die while the others take the state of the one that has come farthest (torchmpirun --elastic)."""

import pytest
from support import jobs

pytestmark = jobs.needs_mpi

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

TRAINING = """
    import os, signal, sys
    import torch
    import torchmpi_py as mpi
    from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator
    from torchmpi_py.runtime import survivors

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    HOOKS

    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    others = mpi.split(int(rank > 0))
    engine = AllReduceSGDEngine()
    for name in ("on_backward", "on_update", "on_recovery", "on_end_epoch"):
        if name in globals():
            setattr(engine.hooks, name, globals()[name])
    data = torch.utils.data.TensorDataset(torch.ones(48, 1), torch.ones(48, 1))
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=DatasetIterator(data, 2), optimizer=optimizer,
                 maxepoch=int(sys.argv[2]), checkpoint=sys.argv[1], stateful={"schedule": schedule})
    mpi.nn.check_with_allreduce(network)
    print(f"size {mpi.size()} calls {schedule.last_epoch} rate {optimizer.param_groups[0]['lr']}", flush=True)
    mpi.stop()
"""

# Rank 2 dies in a hook which rank 1 cannot complete then: rank 0 is a step ahead. Of four ranks it dies when it has
# given its state.
AHEAD = """
    catch_up = survivors.catch_up

    def caught_up(*arguments):
        farthest = catch_up(*arguments)
        if rank == 0 and size == 4:
            die()
        return farthest

    survivors.catch_up = caught_up

    def on_update(state):
        schedule.step()
        if state.t == 3 and rank == 2:
            die()

    def on_backward(state):
        if state.t == 2 and rank in (1, 3):
            mpi.barrier(comm=others)  # until rank 2 is dead

    def on_recovery(state):
        rates = state.optimizer.param_groups[0]["lr"], schedule.get_last_lr()[0]
        place = f"t {state.t} position {state.position} calls {schedule.last_epoch}"
        print(f"size {mpi.size()} {place} {rates}", flush=True)
"""

# Rank 2 dies at the end of an epoch, where rank 1 waits for it, and rank 0 has made the step of the schedule.
END_OF_EPOCH = """
    def on_end_epoch(state):
        if state.epoch == 1 and mpi.size() == 3:
            if rank == 2:
                die()
            if rank == 1:
                mpi.barrier(comm=others)
        STEP
            schedule.step()
"""


def lines(folder, program, ranks, *arguments):
    options = ["-n", ranks, "--bind", "none", "--timeout", "150", "--elastic"]
    job = jobs.torchmpirun(*options, jobs.write(folder, program), folder / "checkpoints", *arguments)
    assert job.returncode == 0, job.stderr
    return [line for line in job.stdout.splitlines() if line.startswith("size")]


@pytest.mark.slow
def test_the_farthest_rank_dies_after_giving_its_state(tmp_path):
    assert lines(tmp_path, CATCH_UP, 3) == ["size 2 step 5 weight 1.0"] * 2


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_engine_stands_where_the_farthest_rank_stood(tmp_path, ranks):
    found = lines(tmp_path, TRAINING.replace("    HOOKS", AHEAD), ranks, 1)
    place = 3 * 2 * ranks  # three steps of two samples a rank
    steps = 3 + -(-(48 - place) // 4)  # then the rest, on two ranks
    assert found[:2] == [f"size 2 t 3 position {place} calls 3 (0.0625, 0.0625)"] * 2
    assert found[2:] == [f"size 2 calls {steps} rate {0.5 ** (steps + 1)}"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "calls"),
    [
        ("while schedule.last_epoch < state.epoch:", 2),
        ("for _ in range(1):", 3),  # it is called again
    ],
)
def test_a_schedule_of_which_some_ranks_have_made_the_step(tmp_path, step, calls):
    program = TRAINING.replace("    HOOKS", END_OF_EPOCH.replace("STEP", step))
    assert lines(tmp_path, program, 3, 2) == [f"size 2 calls {calls} rate {0.5 ** (calls + 1)}"] * 2
