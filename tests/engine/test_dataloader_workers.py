"""A DataLoader with worker processes, in a program of its own: the workers are children of ranks."""

import pytest
from support import jobs

PROGRAM = """
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine


class Points(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None, "not in a worker"
        return torch.full((2,), float(index)), index % 3


if __name__ == "__main__":
    mpi.start()
    workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": sys.argv[1]}
    loader = DataLoader(Points(), 4, shuffle=True, **workers)  # the engine divides it
    engine, seen, network = AllReduceSGDEngine(), [], torch.nn.Linear(2, 3)
    engine.hooks.on_sample = lambda state: seen.extend(state.sample[0][:, 0].tolist())
    options = {"criterion": torch.nn.CrossEntropyLoss(), "lr": 1e-3, "maxepoch": 2}
    state = engine.train(network=network, iterator=loader, **options)
    assert state.t == 6, state.t
    mpi.nn.check_with_allreduce(network)
    indices = sorted(mpi.allgather(torch.tensor(seen)).int().tolist())
    assert indices == sorted(2 * list(range(24))), indices
    mpi.stop()
"""


@pytest.mark.slow
@jobs.needs_mpi
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_serve_two_ranks(tmp_path, how):
    job = jobs.torchmpirun("-n", 2, "--timeout", 150, jobs.write(tmp_path, PROGRAM), how)
    assert job.returncode == 0, job.stdout + job.stderr
