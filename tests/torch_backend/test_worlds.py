"""Jobs: programs that know of torch.distributed alone, and read torchrun's variables, with no import of the package."""

import json
import os
import sys
import textwrap

import pytest
import torch
from support import jobs

from torchmpi_py.errors import TorchMPIError
from torchmpi_py.launch.command import inherited_environment
from torchmpi_py.torch_backend import meeting

RANKS = 3


def run(tmp_path, program, *command, **variables):
    """The output of the program, which finds torch's entry point also where this environment was made without it."""
    path = jobs.write(tmp_path, program)
    jobs.write(tmp_path, "Metadata-Version: 2.1\nName: entry\nVersion: 0\n", "installed/entry-0.dist-info/METADATA")
    entry = "[torch.backends]\ntorchmpi = torchmpi_py.torch_backend.registration:register\n"
    jobs.write(tmp_path, entry, "installed/entry-0.dist-info/entry_points.txt")
    paths = os.pathsep.join([str(tmp_path / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = inherited_environment(os.environ)
    dropped = [word for name in os.environ if name not in kept for word in ("-u", name)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | variables
    return jobs.run("env", *dropped, *(f"{name}={value}" for name, value in environment.items()), *command, path)


def test_the_variables_and_every_way_to_meet(tmp_path):
    """torchmpirun started by a torchrun's worker: it has stale variables of its own."""
    program = """
        import json, os, sys
        import torch, torch.distributed as dist

        assert not {"mpi4py.MPI", "torchmpi_py.runtime.process"} & set(sys.modules)

        def total(*args, **how):
            dist.init_process_group(*args, **how)
            x = torch.tensor([10.0**dist.get_rank()])
            dist.all_reduce(x)
            dist.barrier()
            dist.destroy_process_group()
            return int(x)

        world = {name: os.environ[name] for name in
                 ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")}
        rank, size = int(world["RANK"]), int(world["WORLD_SIZE"])
        totals = [total("torchmpi"), total(), total("gloo", init_method="env://")]
        address = f"tcp://{world['MASTER_ADDR']}:{world['MASTER_PORT']}"
        totals.append(total("torchmpi", init_method=address, rank=rank, world_size=size))
        totals.append(total("gloo", rank=size - 1 - rank, world_size=size))  # in another order
        os.environ["MASTER_PORT"] = os.environ["OWN_PORT"]
        totals.append(total("torchmpi"))
        print(json.dumps([world, totals]) + "\\n", end="", flush=True)
        """
    stale = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    stale |= {"TORCHELASTIC_RUN_ID": "none", "OWN_PORT": str(11_000 + os.getpid() % 18_000)}
    done = run(tmp_path, program, *jobs.TORCHMPIRUN, "-n", RANKS, "--timeout", 90, **stale)
    assert done.returncode == 0, done.stderr
    worlds, totals = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert totals == ([111] * 6,) * RANKS
    worlds = sorted(worlds, key=lambda world: int(world["RANK"]))
    assert len({world["MASTER_PORT"] for world in worlds}) == 1
    for rank, world in enumerate(worlds):
        ranks = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
        expected = {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}
        assert world == expected | {"MASTER_PORT": worlds[0]["MASTER_PORT"]}


ALONE = """
    assert "RANK" not in os.environ
    heavy = ("mpi4py", "torchmpi_py.core", "torchmpi_py.runtime", "torchmpi_py.torch_backend.process_group")
    assert not [name for name in sys.modules if name.startswith(heavy)]
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        assert "environment variable RANK expected" in str(error)  # as without this package
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.distributed_c10d._get_default_group()._get_backend_name() == "gloo"
    dist.destroy_process_group()
    dist.init_process_group("torchmpi")
    dist.all_reduce(x := torch.full((3,), 2.0))
    print(dist.get_world_size(), x.tolist(), flush=True)
    dist.destroy_process_group()
    dist.init_process_group("torchmpi", store=dist.HashStore(), rank=1, world_size=2)  # as torchrun's ranks do
"""


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_one_process_without_a_launcher(tmp_path, autoload):
    """It is a world of one; and ranks that MPI does not know, as with torchrun, are told to launch otherwise."""
    head = "import os, sys, torch, torch.distributed as dist\n"
    if autoload == "0":
        head += "assert 'torchmpi_py' not in sys.modules\nimport torchmpi_py.torch_backend\n"
    program = head + textwrap.dedent(ALONE)
    done = run(tmp_path, program, sys.executable, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert (done.returncode, done.stdout) == (1, "1 [2.0, 2.0, 2.0]\n"), done.stderr
    assert "rank 1 of [0, 1], but MPI numbers it rank 0 of 1. Launch with torchmpirun" in done.stderr


def test_a_torch_that_is_too_old_for_groups(monkeypatch):
    monkeypatch.setattr(torch._C._distributed_c10d, "FakeProcessGroup", object)
    with pytest.raises(TorchMPIError, match=rf"needs torch 2.10 or later, found torch {torch.__version__[:4]}"):
        meeting.create(None)
