"""A rank dies in an epoch whose order a sampler has drawn (torchmpirun --elastic): the rest of that order is used."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, signal, sys

import numpy as np
import torch
from torch.utils.data import TensorDataset

import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

folder, moment, number = sys.argv[1:]
mpi.start()
rank = mpi.rank()
file = open(f"{folder}/rank-{rank}", "w")


class Drawn:
    draw = np.random.default_rng(5)  # unknown to the engine, and another order at each iteration

    def __len__(self):
        return 48

    def __iter__(self):
        file.write(json.dumps(["draw", mpi.size(), 0, 0, []]) + "\\n")
        return iter(self.draw.permutation(48).tolist())


def write(kind, state, numbers):
    file.write(json.dumps([kind, state.epoch, *state.at, numbers]) + "\\n")
    file.flush()
    if rank == 1 and kind == moment and state.t == int(number):
        os.kill(os.getpid(), signal.SIGKILL)


def on_sample(state):
    state.at = state.position, state.next_position
    write("sample", state, state.sample[1][: state.num_samples, 0].int().tolist())


engine = AllReduceSGDEngine()
engine.hooks.on_sample = on_sample
engine.hooks.on_update = lambda state: write("update", state, [])
engine.hooks.on_end_epoch = lambda state: write("end_epoch", state, [])
dataset = TensorDataset(torch.ones(48, 1), torch.arange(48.0).unsqueeze(1))
network = torch.nn.Linear(1, 1)
iterator = DatasetIterator(dataset, 2, sampler=Drawn())
engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=iterator, lr=1e-6, maxepoch=2)
mpi.nn.check_with_allreduce(network)
mpi.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("moment", "number"), [("sample", 0), ("update", 3), ("sample", 12), ("end_epoch", 8)])
def test_the_survivors_keep_the_order(tmp_path, moment, number):
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", "3", "--bind", "none", "--timeout", "150", "--elastic"]
    command = [*launch, tmp_path / "program.py", tmp_path, moment, str(number)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert job.returncode == 0, job.stderr
    files = [list(map(json.loads, path.read_text().splitlines())) for path in sorted(tmp_path.glob("rank-*"))]
    survivors = files[0], files[2]
    assert [[kind for kind, *_ in lines].count("draw") for lines in survivors] == [2, 2]
    steps = {(epoch, *at) for lines in survivors for kind, epoch, *at, _ in lines if kind == "update"}
    for epoch in (0, 1):
        used = [n for lines in files for kind, *at, numbers in lines if kind == "sample" and tuple(at) in steps
                if at[0] == epoch for n in numbers]  # fmt: skip
        assert sorted(used) == list(range(48))
