"""Jobs: programs that know of torch.distributed alone, and read torchrun's variables, with no import of the package."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from torchmpi_py.errors import TorchMPIError
from torchmpi_py.launch import __main__ as launcher
from torchmpi_py.torch_backend import meeting

BIN = os.path.dirname(sys.executable)
RANKS = 3


def run(tmp_path, program, *command, **variables):
    """The output of the program, which finds torch's entry point also where this environment was made without it."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    installed = tmp_path / "installed" / "entry-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 0\n")
    entry = "[torch.backends]\ntorchmpi = torchmpi_py.torch_backend.registration:register\n"
    (installed / "entry_points.txt").write_text(entry)
    paths = os.pathsep.join([str(installed.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = launcher.inherited_environment(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=200, env=environment | variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_variables_and_every_way_to_meet(tmp_path):
    """torchmpirun started by a torchrun's worker: it has stale variables of its own."""
    output = run(
        tmp_path,
        """
        import json, os, socket, sys
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
        """,
        os.path.join(BIN, "torchmpirun"),
        "-n",
        str(RANKS),
        "--timeout",
        "90",
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="192.0.2.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="none",
        OWN_PORT=str(11_000 + os.getpid() % 18_000),
    )
    worlds, totals = zip(*map(json.loads, output.splitlines()), strict=True)
    assert totals == ([111] * 6,) * RANKS
    worlds = sorted(worlds, key=lambda world: int(world["RANK"]))
    assert len({world["MASTER_PORT"] for world in worlds}) == 1
    for rank, world in enumerate(worlds):
        del world["MASTER_PORT"]
        assert world == {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }


ALONE = """
    import os, sys, torch, torch.distributed as dist

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
    print(dist.get_world_size())
"""


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_one_process_without_a_launcher(tmp_path, autoload):
    program = textwrap.dedent(ALONE)
    if autoload == "0":
        program = (
            "import torch, sys\nassert 'torchmpi_py' not in sys.modules\nimport torchmpi_py.torch_backend\n" + program
        )
    assert run(tmp_path, program, sys.executable, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == "1\n"


def test_a_torch_that_is_too_old_for_groups(monkeypatch):
    monkeypatch.setattr(torch._C._distributed_c10d, "FakeProcessGroup", object)
    with pytest.raises(TorchMPIError, match=rf"needs torch 2.10 or later, and this is torch {torch.__version__[:4]}"):
        meeting.create(None)
