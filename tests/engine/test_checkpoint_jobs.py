"""Jobs that are killed, in steps and in saves, and started again: they end with the parameters of one that was not.

With TORCHMPI_FAULTS=all (scripts/test_faults) many of them.
"""

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_folder import listed

from torchmpi_py.engine import Checkpoints

PROGRAM = Path(__file__).parent / "checkpointed.py"
ALL = os.environ.get("TORCHMPI_FAULTS", "") == "all"
pytestmark = pytest.mark.timeout(240)


def launched(folder, ranks, kills):
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", str(ranks), "--bind", "none", "--timeout", "180"]
    line = [*launch, "--max-restarts", str(len(kills)), str(PROGRAM), str(folder), json.dumps(kills)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, capture_output=True, text=True, timeout=200, env=environment, check=False)


def result(folder, ranks, kills):
    folder.mkdir(exist_ok=True)
    job = launched(folder, ranks, kills)
    assert job.returncode == 0, (kills, job.stderr[-3000:])
    left = sorted(listed(folder / "checkpoints"))
    assert len(left) == 3, (kills, left)
    assert all(name.startswith("step-") and name[5:].isdigit() for name in left), (kills, left)
    return torch.load(folder / "result.pt", weights_only=True)


def assert_as_if_undisturbed(tmp_path, ranks, trials):
    undisturbed = result(tmp_path / f"undisturbed-{ranks}", ranks, [])
    assert undisturbed["t"] == 3 * math.ceil(61 / (3 * ranks))
    for number, kills in enumerate(trials):
        disturbed = result(tmp_path / f"{ranks}-{number}", ranks, kills)
        assert disturbed["t"] == undisturbed["t"], kills
        assert 1 <= disturbed["start"] <= len(kills), kills  # the last ones may come too late
        for name, tensor in undisturbed["network"].items():
            assert torch.equal(disturbed["network"][name], tensor), (kills, name)


def drawn(draw, ranks):
    """Three kills, each somewhat later than the one before, or earlier."""
    steps = 3 * math.ceil(61 / (3 * ranks)) - 2
    at = sorted(draw.randrange(1, steps) for _ in range(3))
    kinds = [None, draw.randrange(50), draw.randrange(70)]
    draw.shuffle(kinds)
    return [
        {"rank": draw.randrange(ranks), "step": step, "point": point} for step, point in zip(at, kinds, strict=True)
    ]


@pytest.mark.skipif(not ALL, reason="TORCHMPI_FAULTS=all is not set")
def test_killed_in_a_save(tmp_path):
    assert_as_if_undisturbed(tmp_path, 2, [[{"rank": 0, "step": 9, "point": 33}]])


def test_asked_to_end_on_one_rank(tmp_path):
    """All ranks save in the same step and end; it is no failure, and the run goes on from there bit for bit."""
    undisturbed = result(tmp_path / "undisturbed", 2, [])
    (tmp_path / "asked").mkdir()
    job = launched(tmp_path / "asked", 2, [{"rank": 1, "step": 9, "point": "asked"}])
    assert job.returncode == 143, job.stderr[-3000:]
    (saved,) = sorted(listed(tmp_path / "asked" / "checkpoints"))[-1:]
    folder = tmp_path / "asked" / "checkpoints"
    told = (
        f"asked to end (SIGTERM): step {int(saved[5:])} is saved in {folder}, and the program ends with exit code 143\n"
    )
    assert job.stderr == told
    assert 9 <= int(saved[5:]) < undisturbed["t"]
    resumed = result(tmp_path / "asked", 2, [])
    assert resumed["t"] == undisturbed["t"]
    for name, tensor in undisturbed["network"].items():
        assert torch.equal(resumed["network"][name], tensor), name


EVALUATED = """
import os, signal, sys, time, torch
import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator
mpi.start()
data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
engine = AllReduceSGDEngine()
def on_update(state):
    time.sleep(0.05)
    if state.t == 5 and mpi.rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
engine.hooks.on_update = on_update
print("starts", flush=True)
engine.train(network=torch.nn.Linear(3, 1), criterion=torch.nn.MSELoss(), iterator=DatasetIterator(data, 4), lr=0.01,
             maxepoch=100, checkpoint=sys.argv[1], evaluator=lambda network, epoch: epoch)
"""


@pytest.mark.slow
def test_asked_to_end_beside_an_evaluator(tmp_path):
    """It is no failure on the rank that evaluates either: the job is not started again."""
    (tmp_path / "evaluated.py").write_text(EVALUATED)
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", "3", "--bind", "none", "--timeout", "150"]
    line = [*launch, "--max-restarts", "1", str(tmp_path / "evaluated.py"), str(tmp_path / "checkpoints")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(line, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert (job.returncode, job.stdout) == (143, "starts\n" * 3), job.stderr
    assert re.fullmatch(r"asked to end \(SIGTERM\): step \d+ is saved in .*\n", job.stderr), job.stderr


SLOW = """
import os, signal, sys, time
import torchmpi_py as mpi
from torchmpi_py.engine import Checkpoints, checkpoint_files as disk

mpi.start()
write = disk.write


def slow(path, content):
    if mpi.rank() == 0 and "own" in content:
        if content["own"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2.2)
    return write(path, content)


disk.write = slow
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"x": 1})
print("saved", flush=True)
checkpoints.save(2, {"x": 1}, own={"dies": True})
"""


@pytest.mark.slow
def test_a_save_that_takes_longer_than_the_deadline(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", "2", "--bind", "none", "--timeout", "150"]
    line = [*launch, str(tmp_path / "slow.py"), str(tmp_path / "checkpoints")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHMPI_DEADLINE": "1"}
    job = subprocess.run(line, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert job.stdout.count("saved") == 2, job.stderr[-3000:]
    assert job.returncode not in (0, 124), job.stderr[-3000:]
    assert "not complete after" not in job.stderr
    assert Checkpoints(tmp_path / "checkpoints").load() == (1, {"x": 1})


@pytest.mark.skipif(not ALL, reason="TORCHMPI_FAULTS=all is not set")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_kills(tmp_path, ranks):
    draw = random.Random(ranks)
    assert_as_if_undisturbed(tmp_path, ranks, [drawn(draw, ranks) for _ in range(3)])


NESTED = """
import os, signal, sys, torch
import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator
mpi.start()
data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
engine, outer, ends = AllReduceSGDEngine(), torch.nn.Linear(3, 1), []
def train(network, name):
    engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=DatasetIterator(data, 2), lr=0.01, maxepoch=1,
                 checkpoint=os.path.join(sys.argv[1], name))
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
    (tmp_path / "nested.py").write_text(NESTED)
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", "3", "--bind", "none", "--timeout", "150", "--elastic"]
    job = subprocess.run([*launch, tmp_path / "nested.py", tmp_path], capture_output=True, text=True, timeout=200)
    assert job.returncode == 0, job.stderr
    assert listed(tmp_path / "inner") == listed(tmp_path / "outer") == ["step-000002"]
