"""The examples with DDP and FSDP2, run as their users run them, several jobs at a time.

An epoch on two ranks are compared: rank with rank, bit by bit; with DDP on gloo; with one process.
"""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(240)
EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")
two_ranks = (TORCHMPIRUN, "-n", 2, "--bind", "none")  # several such jobs would share the first cores
pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")


@pytest.fixture(autouse=True)
def one_thread():
    """More of them wait for each other while jobs of other tests have the cores."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


class Job:
    """One that runs; ``output()`` when it has ended."""

    def __init__(self, *command):
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Clusters may set an address. Without a RANK the ranks meet over MPI.
            env=os.environ | {"MASTER_ADDR": "192.0.2.1", "OMP_NUM_THREADS": "1"},
        )

    def output(self):
        try:
            text, _ = self._process.communicate(timeout=200)
        finally:
            self._process.kill()
        assert self._process.returncode == 0, text
        return text


def parameters(folder, rank=0):
    return torch.load(folder / f"rank-{rank}.pt")


def largest_difference(some, others):
    assert list(some) == list(others)
    return max(float((x - others[name]).abs().max()) for name, x in some.items())


def test_ddp_is_bit_equal_on_both_ranks_and_equal_to_gloo_and_to_one_process(tmp_path):
    ours, gloo, alone = (tmp_path / name for name in ("ours", "gloo", "alone"))
    example = (EXAMPLES / "ddp_digits.py", "--epochs", 1, "--save")
    jobs = [
        Job(*two_ranks, *example, ours),
        Job(*two_ranks, *example, gloo, "--backend", "gloo"),
        Job(sys.executable, *example, alone),
    ]
    for job, num_ranks in zip(jobs, (2, 2, 1), strict=True):
        assert f"{num_ranks} ranks: test accuracy" in job.output()
    assert largest_difference(parameters(ours), parameters(ours, 1)) == 0
    assert largest_difference(parameters(gloo), parameters(gloo, 1)) == 0
    assert largest_difference(parameters(ours), parameters(gloo)) < 1e-6
    assert largest_difference(parameters(ours), parameters(alone)) < 1e-6


@pytest.mark.slow
def test_lightning_takes_the_steps_of_ddp(tmp_path):
    pytest.importorskip("lightning", reason="the example trains with Lightning: pip install lightning")
    for name in ("ddp", "lightning"):
        job = Job(*two_ranks, EXAMPLES / f"{name}_digits.py", "--epochs", 2, "--save", tmp_path / name)
        assert "2 ranks: test accuracy" in job.output()
    assert largest_difference(parameters(tmp_path / "lightning"), parameters(tmp_path / "lightning", 1)) == 0
    assert largest_difference(parameters(tmp_path / "lightning"), parameters(tmp_path / "ddp")) < 1e-6


def test_without_its_ten_lines_it_is_a_script_for_one_process(tmp_path, monkeypatch, capsys):
    lines = (EXAMPLES / "ddp_digits.py").read_text().splitlines()
    rest = [line for line in lines if not line.endswith("  # ddp")]
    assert len(lines) - len(rest) == 10
    script = tmp_path / "digits.py"
    script.write_text("\n".join(rest))
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [str(script), "--epochs", "10"])
    runpy.run_path(str(script))
    (accuracy,) = re.findall(r"1 ranks: test accuracy ([\d.]+) %", capsys.readouterr().out)
    assert float(accuracy) > 90


def trained(digits_data, folder):
    """What fsdp_digits.py does, in this process; it writes a checkpoint after the first of two epochs."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.utils.data import DataLoader, DistributedSampler

    torch.manual_seed(1111)
    train_set, _ = digits_data.load()
    model = digits_data.conv_net(image_size=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    sampler = DistributedSampler(train_set, 1, 0, seed=1111)
    for epoch in range(2):
        if epoch == 1:
            network, state = get_state_dict(model, optimizer)
            dcp.save({"network": network, "optimizer": state, "epochs": epoch}, checkpoint_id=folder, no_dist=True)
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(train_set, 60, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fsdp_goes_on_from_the_checkpoint_of_one_process(tmp_path, monkeypatch):
    """An epoch here and one more on two ranks: what one process has after both."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    monkeypatch.syspath_prepend(EXAMPLES)
    half, whole, file = (tmp_path / name for name in ("half", "whole", "rank-0.pt"))
    expected = trained(importlib.import_module("digits_data"), half)
    job = Job(*two_ranks, EXAMPLES / "fsdp_digits.py", "--epochs", 2, "--load", half, "--save", whole)
    assert "2 ranks, epochs 1 to 2" in job.output()
    dcp_to_torch_save(whole, file)
    assert largest_difference(parameters(tmp_path)["network"], expected) < 1e-6
