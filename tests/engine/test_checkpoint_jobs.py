"""Jobs that are killed, in steps and in saves, and started again: they end with the parameters of one that was not.

With TORCHMPI_FAULTS=all (scripts/test_faults) many of them.
"""

import json
import math
import os
import random
import re
from pathlib import Path

import pytest
from runs import listed
from support import jobs

from torchmpi_py.engine import Checkpoints

PROGRAM = Path(__file__).parent / "checkpointed.py"
ALL = os.environ.get("TORCHMPI_FAULTS", "") == "all"
pytestmark = jobs.needs_mpi


def launched(ranks, *arguments, **environment):
    options = ["-n", ranks, "--bind", "none", "--timeout", "150"]
    return jobs.torchmpirun(*options, *arguments, env={"OMP_NUM_THREADS": "1"} | environment)


def run(folder, ranks, every, kills):
    folder.mkdir(exist_ok=True)
    return launched(ranks, "--max-restarts", len(kills), PROGRAM, folder, json.dumps(every), json.dumps(kills))


def num_steps(ranks):
    return 3 * math.ceil(61 / (3 * ranks))


def assert_as_if_undisturbed(job, folder, ranks):
    """Also that nothing but checkpoints is left; the start in which the job ended."""
    assert job.returncode == 0, job.stderr[-3000:]
    left = listed(folder / "checkpoints")
    assert len(left) == 3, left
    assert all(re.fullmatch(r"step-\d{6}\.pt", name) for name in left), left
    ends = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    start = ends[0]["start"]
    steps = num_steps(ranks)
    assert ends == [{"step": steps, "start": start, "is_equal": True, "steps": steps}] * ranks
    return start


@pytest.mark.slow
def test_killed_in_a_save_and_then_asked_to_end_on_one_rank(tmp_path):
    """On SIGTERM all ranks save in the same step and end; it is no failure, and the run goes on from there."""
    kills = [{"rank": 0, "step": 7, "point": 9}, {"rank": 1, "step": 9, "point": "asked"}]
    job = run(tmp_path, 2, 8, kills)
    assert job.returncode == 143, job.stderr[-3000:]
    saved = int(listed(tmp_path / "checkpoints")[-1][5:-3])
    assert 9 <= saved < num_steps(2)
    told = [line for line in job.stderr.splitlines() if line.startswith("a rank received SIGTERM: ")]
    assert len(told) == 1
    assert f"step {saved} is saved in {tmp_path / 'checkpoints'}" in told[0]
    assert assert_as_if_undisturbed(run(tmp_path, 2, 8, []), tmp_path, 2) == 0


@pytest.mark.skipif(not ALL, reason="TORCHMPI_FAULTS=all is not set")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_kills(tmp_path, ranks):
    """Three kills, each somewhat later than the one before, or earlier."""
    draw = random.Random(ranks)
    for number in range(3):
        steps = sorted(draw.randrange(1, num_steps(ranks) - 2) for _ in range(3))
        points = [None, draw.randrange(15), draw.randrange(25)]
        draw.shuffle(points)
        kills = [
            {"rank": draw.randrange(ranks), "step": step, "point": point}
            for step, point in zip(steps, points, strict=True)
        ]
        folder = tmp_path / f"{number}"
        start = assert_as_if_undisturbed(run(folder, ranks, 1, kills), folder, ranks)
        assert 1 <= start <= len(kills), kills  # the last ones may come too late


SLOW = """
    import os, signal, sys, time
    import torchmpi_py as mpi
    from torchmpi_py.engine import Checkpoints, checkpoint_file as disk

    mpi.start()
    write = disk.write

    def slow(path, content):
        if content["step"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2.2)
        return write(path, content)

    disk.write = slow
    checkpoints = Checkpoints(sys.argv[1])
    checkpoints.save(1, {"x": 1})
    print("saved", flush=True)
    checkpoints.save(2, {"x": 1})
"""


@pytest.mark.slow
def test_a_save_that_takes_longer_than_the_deadline(tmp_path):
    job = launched(2, jobs.write(tmp_path, SLOW), tmp_path / "checkpoints", TORCHMPI_DEADLINE="1")
    assert job.stdout.count("saved") == 2, job.stderr[-3000:]
    assert job.returncode not in (0, 124), job.stderr[-3000:]
    assert "not complete after" not in job.stderr
    assert Checkpoints(tmp_path / "checkpoints").load() == (1, {"x": 1})


NESTED = """
    import os, signal, sys, torch
    import torchmpi_py as mpi
    from torchmpi_py.engine import AllReduceSGDEngine, Checkpoint, DatasetIterator
    mpi.start()
    data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
    engine, outer, ends = AllReduceSGDEngine(), torch.nn.Linear(3, 1), []
    def train(network, name):
        engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=DatasetIterator(data, 2), lr=0.01,
                     maxepoch=1, extensions=[Checkpoint(os.path.join(sys.argv[1], name))])
    def on_end_epoch(state):
        if state.network is outer and not ends:
            ends.append(1)
            train(torch.nn.Linear(3, 1), "inner")
            if mpi.rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            mpi.barrier()
    engine.hooks.on_end_epoch = on_end_epoch
    train(outer, "outer")
    mpi.stop()
"""


@pytest.mark.slow
def test_a_death_after_a_hook_has_trained_another_network(tmp_path):
    """The end of the outer epoch is repeated, with its own checkpoint."""
    job = launched(3, "--elastic", jobs.write(tmp_path, NESTED), tmp_path)
    assert job.returncode == 0, job.stderr
    assert listed(tmp_path / "inner") == listed(tmp_path / "outer") == ["step-000002.pt"]
