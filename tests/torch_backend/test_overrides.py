"""What torch.distributed is asked for by name, by a library, or by nobody; mixed strings; ``_set_pg_timeout``; DETAIL.

Each test makes the default group it is about.
"""

import datetime as dt
import importlib
import logging
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from support import jobs
from torch.distributed import distributed_c10d

from torchmpi_py import torch_backend
from torchmpi_py.launch import variables

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _no_group_stays(mpi):
    yield
    if dist.is_initialized():
        end_group()


def end_group():
    """gloo does not wait for a rank that is still connecting."""
    dist.barrier()
    dist.destroy_process_group()


def total(mpi, group=None):
    """Whether a sum over all ranks is right."""
    dist.all_reduce(x := torch.ones(2), group=group)
    return x.tolist() == [mpi.size()] * 2


@pytest.fixture
def warned(caplog, mpi):
    """How many lines of the package's logger hold a text, on rank 0; on the others there are none."""
    caplog.set_level(logging.WARNING, "torchmpi_py")

    def count(text):
        found = sum(text in record.getMessage() for record in caplog.records if record.name == "torchmpi_py")
        assert mpi.rank() == 0 or found == 0
        return mpi.broadcast_object(found, 0)

    return count


@pytest.fixture
def library(tmp_path, monkeypatch):
    """An installed package that makes the default group."""
    text = "import torch.distributed as dist\ndef init(**options):\n    dist.init_process_group(**options)\n"
    jobs.write(tmp_path, text, "site-packages/some_library.py")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    yield importlib.import_module("some_library")
    del sys.modules["some_library"]


def test_a_group_of_gloo_that_nobody_named_is_told(mpi, library, warned):
    """By init_process_group, by a device mesh, or by a library."""
    is_job = (variables.size_in(os.environ) or 1) > 1
    dist.init_process_group()
    assert dist.get_backend() == dist.get_backend(dist.new_group()) == ("gloo" if is_job else "undefined")
    assert warned("the program passed no backend") == is_job
    end_group()
    dist.init_device_mesh("cpu", (mpi.size(),))
    assert warned("the program passed no backend") == 2 * is_job
    end_group()
    library.init(backend="gloo")
    assert warned("some_library requested it") == is_job


def test_what_was_asked_for_by_name_is_not_told(mpi, library, warned):
    dist.init_process_group("gloo")
    end_group()
    library.init(backend="torchmpi")
    dist.new_group(backend="gloo")
    mesh = dist.init_device_mesh("cpu", (1, mpi.size()), mesh_dim_names=("a", "b"))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    groups = [None, dist.new_group(), mesh.get_group("b"), model.process_group]
    assert [dist.get_backend(group) for group in groups] == ["torchmpi"] * 4
    assert warned("instead of MPI") == 0


@pytest.mark.parametrize(
    ("backend_string", "other"),
    [("cpu:torchmpi,cuda:nccl", "nccl"), ("cpu:gloo,cuda:torchmpi", "gloo"), ("cpu:torchmpi", "")],
)
def test_a_mixed_string_makes_one_group_of_ours(mpi, warned, backend_string, other):
    dist.init_process_group(backend_string)
    for group in (None, dist.new_group()):
        assert dist.get_backend(group) == "torchmpi"
    assert isinstance(dist.group.WORLD, torch_backend.ProcessGroup)
    assert warned(f"so {other} is not used") == bool(other)
    assert total(mpi)


def test_the_timeout_that_torch_sets_reaches_the_group(mpi):
    dist.init_process_group("torchmpi")
    group = dist.new_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed_c10d._set_pg_timeout(dt.timedelta(seconds=7))
        distributed_c10d._set_pg_timeout(dt.timedelta(seconds=0.5), group)
    assert (dist.group.WORLD.seconds, group.seconds) == (7.0, 0.5)
    if mpi.size() > 1:
        x = torch.ones(1)
        if mpi.rank() == 0:
            with pytest.raises(dist.DistBackendError, match=r"timeout of 0\.5 s has passed") as late:
                dist.all_reduce(x, group=group)
        mpi.barrier()  # of no group: on a busy machine its timeout would pass
        if mpi.rank() > 0:
            distributed_c10d._set_pg_timeout(dt.timedelta(minutes=3), group)
            dist.all_reduce(x, group=group)
        else:
            assert late.value.handle.wait(dt.timedelta(minutes=3))
        assert x.item() == mpi.size()


@pytest.mark.mpi(min_size=2)
def test_a_part_of_the_ranks_is_refused_as_a_default_group(mpi):
    with pytest.raises(
        mpi.TorchMPIError, match=r"expected all \d ranks of MPI in the group, found 1\..*dist\.new_group\(ranks\)"
    ):
        dist.init_process_group("torchmpi", store=dist.HashStore(), rank=0, world_size=1)


def test_with_torchs_debug_level_detail(mpi):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("torchmpi")
        assert isinstance(dist.group.WORLD, torch_backend.ProcessGroup)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.full((1, 2), float(mpi.rank()))).sum().backward()
        assert model.module.weight.grad.flatten().tolist() == [sum(range(mpi.size())) / mpi.size()] * 4
        assert total(mpi, dist.new_group(backend="gloo"))  # torch's checks are around this one
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
