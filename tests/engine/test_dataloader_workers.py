"""A DataLoader with worker processes, in a program of its own: the workers are children of ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")
pytestmark = pytest.mark.skipif(not TORCHMPIRUN.exists(), reason=f"no {TORCHMPIRUN}: install the package")

PROGRAM = """
import sys

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine


class Points(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None, "not in a worker"
        return torch.full((2,), float(index)), index % 3


def main():
    mpi.start()
    workers = {"num_workers": 1, "multiprocessing_context": sys.argv[1]}
    sampler = DistributedSampler(Points(), mpi.size(), mpi.rank())
    train(DataLoader(Points(), 4, sampler=sampler, **workers))
    if sys.argv[1] == "fork":  # the other way is slow
        train(DataLoader(Points(), 4, shuffle=True, persistent_workers=True, **workers))  # the engine divides it
    if mpi.rank() == 0:
        print("trained")
    mpi.stop()


def train(loader):
    engine = AllReduceSGDEngine()
    seen = []
    engine.hooks.on_sample = lambda state: seen.extend(state.sample[0][:, 0].tolist())
    torch.manual_seed(mpi.rank())
    network = torch.nn.Linear(2, 3)
    state = engine.train(
        network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=loader, lr=1e-3, maxepoch=2
    )
    assert state.t == 6, state.t
    mpi.nn.check_with_allreduce(network)
    indices = sorted(mpi.allgather(torch.tensor(seen)).int().tolist())
    assert indices == sorted(2 * list(range(24))), indices


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_serve_two_ranks(tmp_path, how):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [TORCHMPIRUN, "-n", "2", program, how], capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained") == 1
