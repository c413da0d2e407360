"""The program ``benchmarks/modes``, run short as its users run it, and its arithmetic."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MODES = Path(__file__).parents[2] / "benchmarks" / "modes"
TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")
SHORT = ["--epochs", "1", "--seeds", "1", "--batch", "240"]
SLOW = ["--slow-rank", "--slow-seconds", "0.05", "--step-seconds", "0.002", "--rounds", "1", "--lead-steps", "12"]
needs_launcher = pytest.mark.skipif(not TORCHMPIRUN.exists(), reason=f"no {TORCHMPIRUN}: install the package")
pytestmark = pytest.mark.timeout(240)


def run(*words, code=0):
    command = [TORCHMPIRUN, "-n", "3", MODES / "__main__.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def module(monkeypatch):
    """The names in a module of the program, by the name of the module; the program is no package."""
    monkeypatch.syspath_prepend(MODES)
    return lambda name: runpy.run_path(str(MODES / f"{name}.py"))


@needs_launcher
def test_every_mode_trains_and_stands_in_the_report(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'torchmpi-py[examples]'")
    printed = run(*SHORT, *SLOW, "--json", tmp_path / "modes.json").stdout
    stored = json.loads((tmp_path / "modes.json").read_text())
    runs = {run["mode"]: run for run in stored["runs"]}
    assert set(runs) == set(stored["settings"])
    assert {"allreduce", "dsgd", "synchronous", "local", "downpour", "easgd", "ssp", "hogwild"} <= set(runs)
    assert all(f"| {name} " in printed for name in runs)
    assert runs["dsgd"]["accuracy"] == pytest.approx(runs["allreduce"]["accuracy"], abs=1)
    # both send the least possible, but the servers are seeded first; there are six steps
    assert 1 < runs["synchronous"]["num_bytes"] / runs["allreduce"]["num_bytes"] < 1.3
    assert 0 == runs["hogwild"]["num_bytes"] < runs["easgd"]["num_bytes"] < runs["allreduce"]["num_bytes"]
    assert max(stored["slow"]["leads"]) <= stored["slow"]["staleness"] == 3
    assert "## One slow rank" in printed
    cells = next(line.split("|") for line in printed.splitlines() if line.startswith("| easgd "))
    gain = runs["easgd"]["accuracy"] - runs["allreduce"]["accuracy"]
    assert float(cells[2]) == pytest.approx(runs["easgd"]["accuracy"], abs=0.006)
    assert float(cells[5]) == pytest.approx(gain, abs=0.006)
    assert float(cells[7]) == pytest.approx(runs["easgd"]["num_bytes"] / 1e6, rel=0.01)


@needs_launcher
def test_an_unknown_mode_is_named_once():
    assert run(*SHORT, "--modes", "easgd,x", code=2).stderr.count("'x' is unknown; known modes: allreduce, dsgd") == 1


def test_the_largest_lead(module):
    """Rank 0 begins and returns at once; rank 1's updates begin at 2, 5, 9."""
    largest_lead = module("slow_rank")["largest_lead"]
    slow = [2.0, 5.0, 9.0]
    assert largest_lead([[0.0, 1.0, 3.0], slow], [[0.0, 1.5, 3.0], slow]) == 2
    assert largest_lead([[0.0, 4.0, 8.0], slow], [[2.0, 5.0, 9.0], slow]) == 0
    assert largest_lead([[0.0, 0.0, 0.0], slow], [[0.0, 0.0, 0.0], slow]) == 3


def test_a_paced_iterator_ends_after_its_steps_or_its_time(module):
    Paced = module("slow_rank")["Paced"]
    by_steps = Paced(["a", "b"], 0.0, seconds=None, steps=3)
    assert list(by_steps) == ["a", "b", "a", "b"]
    assert by_steps.num_timed == 3
    by_time = Paced(["a", "b"], 0.001, seconds=0.02, steps=None)
    assert len(list(by_time)) == by_time.num_timed + 1 > 1


def test_a_row_of_several_seeds(module):
    program = module("__main__")
    runs = [
        program["Run"](mode, seed, 90.0 + seed + gain, 1.0, 1e6)
        for mode, gain in (("allreduce", 0), ("easgd", -0.5))
        for seed in (2, 0, 1)
    ]
    report = program["Report"](1, 60, 100, {"allreduce": "lr 1", "easgd": "lr 2"}, {}, [], runs, None)
    assert report.gain("easgd") == -0.5
    (line,) = [line for line in program["render"](report).splitlines() if line.startswith("| easgd")]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        "easgd", "90.50", "89.50", "91.50", "-0.50", "1.00", "1.00", "lr 2",
    ]  # fmt: skip


def test_every_run_starts_from_the_same_network(module):
    make_network = module("modes")["make_network"]
    one, other = (make_network(7) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))
