"""The watch between many nodes: hubs as they are, and processes that speak their links alone."""

import json
import pathlib
import sys

import pytest
from support import jobs

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "scale" / "many_leaders.py"
SLOW = [pytest.param(num_nodes, marks=[pytest.mark.slow, pytest.mark.timeout(500)]) for num_nodes in (512, 2000)]


@pytest.mark.parametrize("num_nodes", [40, *SLOW])
def test_hubs_of_many_nodes(tmp_path, num_nodes):
    done = jobs.run(sys.executable, PROGRAM, num_nodes, seconds=450, env={"TORCHMPI_DUMP_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found, last = json.loads(done.stdout), 64 * num_nodes - 1
    assert found["hub"]["links"] == num_nodes - 1 <= found["hub"]["descriptors"] < num_nodes + 64
    assert sum(found["claims"].values()) == num_nodes - 2 >= 3 * found["claims"]["no answer"]
    lines = found["late_report"].splitlines()
    assert lines[1].startswith(f"{64 * (num_nodes - 2) - 1} ranks (128-134, 136-{last}): in allreduce for ")
    assert "rank 135 (process 1): in barrier for 1.0 s, called at train.py:9" in lines[:100] == lines
    assert f"rank {last - 63} on host host{num_nodes - 1} died, or exited without" in found["death_report"]
