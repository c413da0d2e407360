"""Facts about the machine and its GPUs, as far as they can be tested without a GPU."""

import pytest
import torch

from torchmpi_py.bench import UsageError, machine
from torchmpi_py.core.mpi_api import MPI

GPU = torch.device("cuda", 0)


def test_free_memory_is_what_machine_and_container_leave(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert machine.free_bytes(meminfo, tmp_path) == 4000 << 10
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_bytes(meminfo, tmp_path) == 4000 << 10
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine.free_bytes(meminfo, tmp_path) == 4000
    assert machine.free_bytes(tmp_path / "none", tmp_path / "none") > 0


@pytest.mark.mpi
def test_ranks_on_a_gpu_share_its_memory(mpi, monkeypatch):
    assert not any("GPU" in name for name in machine.facts(MPI.COMM_WORLD))
    monkeypatch.setattr(machine.gpus, "identity", lambda index: "GPU-a")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((mpi.rank() + 1) << 30, 80 << 30))
    assert machine.agreed_max_bytes(MPI.COMM_WORLD, None, GPU) == (1 << 28) // mpi.size()
    assert machine.agreed_max_bytes(MPI.COMM_WORLD, 77, GPU) == 77


@pytest.mark.mpi
def test_one_rank_without_a_gpu_ends_all(mpi, monkeypatch):
    def start(with_cuda=False):
        if with_cuda and mpi.rank() == mpi.size() - 1:
            raise ValueError("no GPU here")
        if len(set(MPI.COMM_WORLD.allgather(with_cuda))) > 1:
            raise mpi.RanksDisagree("on the CPU and not")

    monkeypatch.setattr(mpi, "start", start)
    with pytest.raises(UsageError, match=r"^--device cuda: no GPU here$"):
        machine.start("cuda")
