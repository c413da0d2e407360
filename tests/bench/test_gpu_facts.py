"""What the bench knows of GPUs, as far as it can be told without one."""

import pytest
import torch

from torchmpi_py.bench import UsageError, gpu

GPU = torch.device("cuda", 0)


def test_gpus_in_words():
    shared = [(("here", "a"), "A GPU")] * 3
    assert gpu.describe(shared) == {"GPUs": "1 x A GPU", "ranks per GPU": "3"}
    mixed = [*shared, (("here", "b"), "A GPU"), (("there", "a"), "Another")]
    assert gpu.describe(mixed) == {"GPUs": "2 x A GPU, 1 x Another", "ranks per GPU": "1 or 3"}


def test_the_driver_is_what_the_kernel_says(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(gpu, "_asked_driver", lambda: "asked")
    assert gpu._driver() == "asked"
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  1.23.04  a day\nGCC version: 9\n"
    )
    assert gpu._driver() == "1.23.04"


@pytest.mark.mpi
def test_there_are_no_facts_of_gpus_on_the_cpu(mpi):
    from mpi4py import MPI

    assert gpu.facts(MPI.COMM_WORLD, torch.device("cpu")) == {}


@pytest.mark.mpi
def test_ranks_on_a_gpu_share_its_memory(mpi, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(gpu.gpus, "identity", lambda index: "GPU-a")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((mpi.rank() + 1) << 30, 80 << 30))
    assert gpu.agreed_max_bytes(MPI.COMM_WORLD, None, GPU) == (1 << 28) // mpi.size()
    assert gpu.agreed_max_bytes(MPI.COMM_WORLD, 77, GPU) == 77


@pytest.mark.mpi
def test_one_rank_without_a_gpu_ends_all(mpi, monkeypatch):
    from mpi4py import MPI

    def start(with_cuda=False):
        if with_cuda and mpi.rank() == mpi.size() - 1:
            raise ValueError("no GPU here")
        if len(set(MPI.COMM_WORLD.allgather(with_cuda))) > 1:
            raise mpi.RanksDisagree("on the CPU and not")

    monkeypatch.setattr(mpi, "start", start)
    with pytest.raises(UsageError, match=r"^--device cuda: no GPU here$"):
        gpu.start("cuda")
