"""A rank dies while a stream is read (torchmpirun --elastic): the survivors read what is left, every sample once."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, signal, sys

import torch
from torch.utils.data import IterableDataset

import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, Shards, StreamIterator

folder, way, moment, number = sys.argv[1:]
mpi.start()
rank = mpi.rank()
file = open(f"{folder}/rank-{rank}", "w")


def read(first):
    return [(torch.ones(1), torch.tensor([float(first + i)])) for i in range(7)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([sample for first in range(0, 84, 7) for sample in read(first)])


def write(kind, state, at, numbers):
    file.write(json.dumps([kind, state.epoch, *at, mpi.size(), numbers]) + "\\n")
    file.flush()
    if rank == 1 and kind == moment and state.t == int(number):
        os.kill(os.getpid(), signal.SIGKILL)


def on_sample(state):
    numbers = state.sample[1][: state.num_samples, 0].int().tolist()
    state.at = state.position, state.next_position
    write("sample", state, state.at, numbers)


engine = AllReduceSGDEngine()
engine.hooks.on_sample = on_sample
engine.hooks.on_backward = lambda state: write("backward", state, state.at, [])
engine.hooks.on_update = lambda state: write("update", state, state.at, [])
stream = Shards(list(range(0, 84, 7)), read) if way == "files" else Stream()
network = torch.nn.Linear(1, 1)
iterator = StreamIterator(stream, 2)
engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=iterator, lr=1e-6, maxepoch=2)
mpi.nn.check_with_allreduce(network)
mpi.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("way", "moment", "number"),
    [("files", "sample", 3), ("files", "update", 4), ("iterable", "sample", 0), ("iterable", "backward", 2)],
)
def test_the_survivors_read_the_rest(tmp_path, way, moment, number):
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", "3", "--bind", "none", "--timeout", "150", "--elastic"]
    command = [*launch, tmp_path / "program.py", tmp_path, way, moment, str(number)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert job.returncode == 0, job.stderr
    files = [path.read_text().splitlines() for path in sorted(tmp_path.glob("rank-*"))]
    lines = [[(kind, *rest) for kind, *rest in map(json.loads, file)] for file in files]
    steps = {tuple(at) for file in (lines[0], lines[2]) for kind, *at, _ in file if kind == "update"}
    assert {size for *_, size in steps} == ({2} if number == 0 else {2, 3})
    for epoch in (0, 1):
        used = [n for file in lines for kind, *at, numbers in file if kind == "sample" and tuple(at) in steps
                if at[0] == epoch for n in numbers]  # fmt: skip
        assert sorted(used) == list(range(84))
