"""Which GPU a rank is pinned to, and when; torch's view of the GPUs is made up."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import jobs

from torchmpi_py.launch import transports, variables
from torchmpi_py.runtime import placement
from torchmpi_py.runtime.placement import Local

pytestmark = pytest.mark.timeout(240)
ALL_NAMES = (*variables._LOCAL_RANK, *variables._LOCAL_SIZE, "SLURM_STEP_TASKS_PER_NODE")


@pytest.fixture
def pinned(monkeypatch):
    """GPUs: ``pinned.count`` of them; ``pinned`` lists those that were chosen, in order."""

    class Pinned(list):
        count = 4

    chosen = Pinned()
    for name in ALL_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: chosen.count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.append(torch.device("cuda", index).index))
    return chosen


@pytest.mark.parametrize(
    ("name", "claimed", "count", "index"),
    [
        *(("OMPI_COMM_WORLD_LOCAL_RANK", 3, 4, 3), ("MPI_LOCALRANKID", 5, 4, 1), ("PALS_LOCAL_RANKID", 7, 3, 1)),
        *(("SLURM_LOCALID", 2, 1, 0), ("SLURM_LOCALID", 0, 4, 0)),
    ],
)
def test_a_claimed_local_rank_is_pinned_at_once(pinned, monkeypatch, name, claimed, count, index):
    """More ranks than GPUs share them; a rank that is shown one GPU takes it, whichever it is."""
    monkeypatch.setenv(name, str(claimed))
    pinned.count = count
    device = placement.cuda_device()
    assert device == torch.device("cuda", index)
    assert placement.corrected_device(device, Local(claimed, 8, 1, 8, claimed)) == device
    assert pinned == [index]


@pytest.mark.parametrize(("rank", "index"), [(0, 0), (2, 2), (6, 2)])
def test_without_a_claim_mpi_is_asked_first(pinned, rank, index):
    device = placement.cuda_device()
    assert device == torch.device("cuda")
    assert pinned == []
    assert placement.corrected_device(device, Local(rank, 8, 1, 8, rank)) == torch.device("cuda", index)
    assert pinned == [index]
    assert placement.corrected_device(torch.device("cpu"), Local(1, 2, 1, 2, 1)) == torch.device("cpu")
    assert pinned == [index]


@pytest.mark.parametrize(
    ("claimed", "ranks", "gpus"),
    [
        ([0, 2, 1], [0, 2, 1], [0, 2, 1]),
        ([2, 3], [0, 1], [2, 3]),  # two of the four ranks on a host, which pass for a node
        ([3], [0], [3]),
        ([0, 0, 0], [0, 1, 2], [0, 1, 2]),  # left over of an outer job, on every rank that its script starts
        ([1, 1], [0, 1], [0, 1]),
        ([None, None], [0, 1], [0, 1]),
        ([None, 0], [0, 1], [0, 1]),
        ([0, 1, None], [0, 1, 2], [0, 1, 2]),
    ],
)
def test_every_rank_of_a_node_gets_its_own_place_and_gpu(pinned, monkeypatch, claimed, ranks, gpus):
    """A claimed local rank is believed only if it can be true."""
    for rank, own in enumerate(claimed):
        monkeypatch.delenv("SLURM_LOCALID", raising=False)
        if own is not None:
            monkeypatch.setenv("SLURM_LOCALID", str(own))
        node = mock.Mock(rank=rank, size=len(claimed))  # its communicator
        node.allgather = lambda mine: [(each, mine[1]) for each in claimed]
        local = placement.locate(node)
        assert (local.rank, local.size) == (ranks[rank], len(claimed))
        assert local.cores >= 1
        device = placement.corrected_device(placement.cuda_device(), local)
        assert device == torch.device("cuda", gpus[rank])
        assert pinned[-1] == gpus[rank]


@pytest.mark.parametrize(
    ("visible", "words", "cuda", "built"),
    [
        (None, "CUDA_VISIBLE_DEVICES is not set", None, "built without CUDA"),
        ("", "DEVICES=''", "12.8", "built for CUDA 12.8"),
        ("9", "DEVICES='9'", "12.8", "built for CUDA 12.8"),
    ],
)
def test_no_gpu_is_explained(pinned, monkeypatch, visible, words, cuda, built):
    pinned.count = 0
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match="sees no CUDA device") as caught:
        placement.cuda_device()
    assert words in str(caught.value)
    assert f"torch {torch.__version__} ({built})" in str(caught.value)


@pytest.mark.parametrize(
    "place", ["home/.openmpi/mca-params.conf", "prefix/etc/openmpi-mca-params.conf", "given", None]
)
def test_the_components_of_open_mpi_are_the_users_first(monkeypatch, tmp_path, place):
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # Debian's package of Open MPI has a file that names some
    settings = {"HOME": f"{tmp_path}/home", "OPAL_PREFIX": f"{tmp_path}/prefix", "MPI4PY_LIBMPI": "libmpi.so.40"}
    settings["OMPI_MCA_mca_base_param_files"] = f"{tmp_path}/nothing,{tmp_path}/given"
    with mock.patch.dict(os.environ, settings):
        os.environ.pop(transports.COMPONENTS, None)
        if place is not None:
            jobs.write(tmp_path, "osc = ^ucx\n  btl = self,tcp\n", place)
        placement.prepare_environment()
        assert os.environ.get(transports.COMPONENTS) == ("^ofi" if place is None else None)
        os.environ[transports.COMPONENTS] = "self,sm"
        placement.prepare_environment()
        assert os.environ[transports.COMPONENTS] == "self,sm"


@pytest.mark.parametrize(("cores", "yields"), [("4", True), ("5", False)])
def test_ranks_that_are_bound_yield_only_where_they_fill_the_host(cores, yields, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    place = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    with mock.patch.dict(os.environ, {**place, variables.CORES: cores}):
        for name in ("OMPI_MCA_mpi_yield_when_idle", "MPIR_CVAR_POLLS_BEFORE_YIELD"):
            os.environ.pop(name, None)
        placement.prepare_environment()
        assert (
            ("OMPI_MCA_mpi_yield_when_idle" in os.environ) == ("MPIR_CVAR_POLLS_BEFORE_YIELD" in os.environ) == yields
        )


@pytest.mark.parametrize("starter", ["srun", "mpirun on a node", "mpirun on two nodes"])
def test_aborts_of_a_job_of_srun_or_on_several_hosts_wait_for_the_report_on_the_dead(starter, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # no files of the system's
    name = "OMPI_MCA_opal_abort_delay"
    settings = {"HOME": str(tmp_path), "PMIX_RANK": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    if starter != "srun":  # its daemon is a task of Slurm's, alone on its node
        local_size = "4" if starter == "mpirun on a node" else "2"
        settings |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": local_size}
    with mock.patch.dict(os.environ, settings):
        os.environ.pop(name, None)
        placement.prepare_environment()
        assert os.environ.pop(name, None) == (None if starter == "mpirun on a node" else "1")
        for users in (name, "OMPI_MCA_mpi_abort_delay"):
            with mock.patch.dict(os.environ, {users: "30"}):
                placement.prepare_environment()
                assert os.environ.get(name) == ("30" if users == name else None)
        jobs.write(tmp_path, "mpi_abort_delay = 30\n", ".openmpi/mca-params.conf")
        placement.prepare_environment()
        assert name not in os.environ
