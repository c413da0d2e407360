"""The examples with DDP, Lightning and FSDP2, run as their users run them: two ranks take the steps of one process."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from support import jobs

pytestmark = pytest.mark.timeout(400)
EXAMPLES = Path(__file__).parents[2] / "examples"
pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")


def run(ranks, example, *arguments):
    # Clusters may set an address. Without a RANK the ranks meet over MPI.
    environment = {"MASTER_ADDR": "192.0.2.1", "OMP_NUM_THREADS": "1"}
    words = [EXAMPLES / example, *arguments]
    launched = [sys.executable, *words] if ranks == 1 else [*jobs.TORCHMPIRUN, "-n", ranks, *words]
    done = jobs.run(*launched, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def largest_difference(some, others):
    some, others = (torch.load(file) for file in (some, others))
    some, others = some.get("network", some), others.get("network", others)
    assert list(some) == list(others)
    return max(float((x - others[name]).abs().max()) for name, x in some.items())


@pytest.mark.slow
def test_ddp_and_lightning_are_bit_equal_on_both_ranks_and_equal_to_gloo_and_to_one_process(tmp_path):
    ways = {
        "ours": (2, "ddp_digits.py"),
        "gloo": (2, "ddp_digits.py", "--backend", "gloo"),
        "alone": (1, "ddp_digits.py"),
    }
    if importlib.util.find_spec("lightning"):
        ways["lightning"] = (2, "lightning_digits.py")
    for name, (ranks, *words) in ways.items():
        assert f"{ranks} ranks: test accuracy" in run(ranks, *words, "--epochs", 1, "--save", tmp_path / name)
        assert ranks == 1 or largest_difference(*(tmp_path / name / f"rank-{rank}.pt" for rank in (0, 1))) == 0
        assert largest_difference(tmp_path / name / "rank-0.pt", tmp_path / "ours" / "rank-0.pt") < 1e-6


@pytest.mark.slow
def test_fsdp_goes_on_from_the_checkpoint_of_one_process(tmp_path):
    """An epoch on one process and one more on two ranks: what one process has after both."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run(1, "fsdp_digits.py", "--epochs", 1, "--save", tmp_path / "half")
    run(1, "fsdp_digits.py", "--epochs", 2, "--save", tmp_path / "alone")
    output = run(2, "fsdp_digits.py", "--epochs", 2, "--load", tmp_path / "half", "--save", tmp_path / "ours")
    assert "2 ranks, epochs 1 to 2" in output
    for name in ("alone", "ours"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    assert largest_difference(tmp_path / "alone.pt", tmp_path / "ours.pt") < 1e-6


def test_without_its_ten_lines_it_is_a_script_for_one_process(tmp_path, monkeypatch, capsys):
    lines = (EXAMPLES / "ddp_digits.py").read_text().splitlines()
    rest = [line for line in lines if not line.endswith("  # ddp")]
    assert len(lines) - len(rest) == 10
    script = jobs.write(tmp_path, "\n".join(rest))
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [str(script), "--epochs", "10"])
    runpy.run_path(str(script))
    (accuracy,) = re.findall(r"1 ranks: test accuracy ([\d.]+) %", capsys.readouterr().out)
    assert float(accuracy) > 90
