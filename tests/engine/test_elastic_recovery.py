"""Ranks that die in an epoch, or while the others take the state of the farthest one (torchmpirun --elastic)."""

import json

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
    from torchmpi_py.engine import AllReduceSGDEngine, Checkpoint, DatasetIterator
    from torchmpi_py.runtime import survivors

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    HOOKS

    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    others = mpi.split(int(rank > 0))
    engine = AllReduceSGDEngine()
    for name in ("on_update", "on_recovery", "on_end_epoch"):
        if name in globals():
            setattr(engine.hooks, name, globals()[name])
    data = torch.utils.data.TensorDataset(torch.ones(48, 1), torch.ones(48, 1))
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=DatasetIterator(data, 2), optimizer=optimizer,
                 maxepoch=int(sys.argv[2]), extensions=[Checkpoint(sys.argv[1], stateful={"schedule": schedule})])
    mpi.nn.check_with_allreduce(network)
    print(f"size {mpi.size()} calls {schedule.last_epoch} rate {optimizer.param_groups[0]['lr']}", flush=True)
    mpi.stop()
"""

# Rank 2 dies in a hook which rank 1 cannot complete then: the schedule of rank 0 is a step ahead. Of four ranks rank 0
# dies when it has given its state.
AHEAD = """
    catch_up = survivors.catch_up

    def caught_up(*arguments):
        farthest = catch_up(*arguments)
        if rank == 0 and size == 4:
            die()
        return farthest

    survivors.catch_up = caught_up

    def on_update(state):
        if state.t == 3 and rank in (1, 3):
            mpi.barrier(comm=others)  # until rank 2 is dead
        schedule.step()
        if state.t == 3 and rank == 2:
            die()

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
        while schedule.last_epoch < state.epoch:  # a plain call would be made again on rank 0
            schedule.step()
"""


EPOCH = """
    import json, os, signal, sys

    import numpy as np
    import torch
    from torch.utils.data import IterableDataset, TensorDataset

    import torchmpi_py as mpi
    from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, Shards, StreamIterator

    folder, way, moment, number = sys.argv[1:]
    mpi.start()
    rank = mpi.rank()
    file = open(f"{folder}/rank-{rank}", "w")

    def write(kind, epoch=0, at=(0, 0), numbers=()):
        file.write(json.dumps([kind, epoch, *at, mpi.size(), numbers]) + "\\n")
        file.flush()

    class Drawn:
        draw = np.random.default_rng(5)  # unknown to the engine, and another order at each iteration

        def __len__(self):
            return 84

        def __iter__(self):
            write("draw")
            return iter(self.draw.permutation(84).tolist())

    def read(first):
        return [(torch.ones(1), torch.tensor([float(first + i)])) for i in range(7)]

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([sample for first in range(0, 84, 7) for sample in read(first)])

    def reach(kind, state, numbers=()):
        if kind in ("sample", "backward"):  # the first moments of steps with and without samples
            state.at = state.position, state.place.next_position
        write(kind, state.epoch, state.at, numbers)
        if rank == 1 and kind == moment and state.t == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_sample(state):
        reach("sample", state, state.sample[1][:, 0].int().tolist())

    engine = AllReduceSGDEngine()
    engine.hooks.on_sample = on_sample
    for kind in ("backward", "update", "end_epoch"):
        setattr(engine.hooks, f"on_{kind}", lambda state, kind=kind: reach(kind, state))
    iterators = {
        "sampler": lambda: DatasetIterator(
            TensorDataset(torch.ones(84, 1), torch.arange(84.0).unsqueeze(1)), 2, sampler=Drawn()
        ),
        "files": lambda: StreamIterator(Shards(list(range(0, 84, 7)), read), 2),
        "iterable": lambda: StreamIterator(Stream(), 2),
    }
    network = torch.nn.Linear(1, 1)
    engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=iterators[way](), lr=1e-6, maxepoch=2)
    mpi.nn.check_with_allreduce(network)
    mpi.stop()
"""


def said(folder, program, ranks, *arguments):
    options = ["-n", ranks, "--bind", "none", "--timeout", "150", "--elastic"]
    job = jobs.torchmpirun(*options, jobs.write(folder, program), *arguments)
    assert job.returncode == 0, job.stderr
    return [line for line in job.stdout.splitlines() if line.startswith("size")]


@pytest.mark.slow
def test_the_farthest_rank_dies_after_giving_its_state(tmp_path):
    assert said(tmp_path, CATCH_UP, 3) == ["size 2 step 5 weight 1.0"] * 2


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_engine_stands_where_the_farthest_rank_stood(tmp_path, ranks):
    found = said(tmp_path, TRAINING.replace("    HOOKS", AHEAD), ranks, tmp_path / "checkpoints", 1)
    place = 3 * 2 * ranks  # three steps of two samples a rank
    steps = 3 + -(-(48 - place) // 4)  # then the rest, on two ranks
    assert found[:2] == [f"size 2 t 3 position {place} calls 3 (0.0625, 0.0625)"] * 2
    assert found[2:] == [f"size 2 calls {steps} rate {0.5 ** (steps + 1)}"] * 2


@pytest.mark.slow
def test_a_schedule_of_which_some_ranks_have_made_the_step(tmp_path):
    found = said(tmp_path, TRAINING.replace("    HOOKS", END_OF_EPOCH), 3, tmp_path / "checkpoints", 2)
    assert found == ["size 2 calls 2 rate 0.125"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "moment", "number"),
    [
        *(("sampler", "sample", 0), ("sampler", "update", 3), ("sampler", "sample", 20), ("sampler", "end_epoch", 14)),
        *(("files", "sample", 3), ("files", "update", 4), ("iterable", "sample", 0), ("iterable", "backward", 2)),
    ],
)
def test_the_survivors_use_the_rest(tmp_path, way, moment, number):
    """Of an epoch, every sample once."""
    said(tmp_path, EPOCH, 3, tmp_path, way, moment, number)
    files = [list(map(json.loads, path.read_text().splitlines())) for path in sorted(tmp_path.glob("rank-*"))]
    survivors = files[0], files[2]
    draws = [[kind for kind, *_ in lines].count("draw") for lines in survivors]
    assert draws == ([2, 2] if way == "sampler" else [0, 0])  # an order that was drawn is kept
    steps = {tuple(at) for lines in survivors for kind, *at, _ in lines if kind == "update"}
    assert {size for *_, size in steps} == ({2} if number == 0 else {2, 3})
    for epoch in (0, 1):
        samples = [(at, numbers) for lines in files for kind, *at, numbers in lines if kind == "sample"]
        used = [number for at, numbers in samples if tuple(at) in steps and at[0] == epoch for number in numbers]
        assert sorted(used) == list(range(84))
