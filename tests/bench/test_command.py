"""The command, run as its users run it: two ranks through the MPI of this environment."""

import json
import subprocess
from pathlib import Path

import pytest
from support import jobs

from torchmpi_py.bench import results

pytestmark = jobs.needs_mpi


def bench(*words, code=0):
    done = jobs.torchmpirun("-n", 2, "-m", "torchmpi_py.bench", *words, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_compare(tmp_path):
    quick = ["--seconds", "0.01", "--max-memory", "1M", "--progress"]
    output, errors = bench("compare", "--sizes", "4,1K", *quick, "--json", tmp_path / "r.json")
    report = results.load(tmp_path / "r.json")
    assert report.num_ranks == 2
    assert {(row.num_bytes, row.buffers) for row in report.rows} == {
        (num_bytes, kind) for num_bytes in (4, 1024) for kind in ("warm", "cold")
    }
    assert output.count("| us median |") == 1
    assert output.count("\n|") == 2 + len(report.rows)
    assert "cold" in errors  # the bar


@pytest.mark.slow
def test_the_cost_of_hang_detection(tmp_path):
    program = Path(__file__).parents[2] / "benchmarks" / "watching.py"
    done = jobs.torchmpirun("-n", 2, program, "--blocks", 3, "--json", tmp_path / "r.json", stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    quartiles = json.loads((tmp_path / "r.json").read_text())["quartiles"]
    assert all(0 < low <= middle <= high for low, middle, high in quartiles.values()), quartiles
    assert len(quartiles) == 2
