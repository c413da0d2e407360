"""Programs that are written for torchrun, as their frameworks have it, started by torchmpirun: one world of all ranks.

A framework that is not installed is left out; `scripts/test_programs` installs them all.
"""

import importlib.util
import pathlib
import sys

import pytest
import regression
from support import jobs

HERE = pathlib.Path(__file__).parent
TORCHMPIRUN = *jobs.TORCHMPIRUN, "-n", 2
TORCHRUN = pathlib.Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", 2
SECONDS = 300


@pytest.fixture
def program(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    return HERE / "programs" / f"with_{framework}.py"


def losses(launcher, program, *arguments):
    """By rank; the world that every rank has been in is of two."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    done = jobs.run(*launcher, program, *arguments, seconds=SECONDS - 10, env=environment)
    if "operator torchvision::nms does not exist" in done.stderr:
        pytest.skip("this torchvision was built for another torch")  # PyPI's for CUDA, beside torch for CPUs
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition(": ") for line in done.stdout.splitlines() if line.startswith("rank ")]
    found = {place: [float(number) for number in numbers.split()] for place, _, numbers in lines}
    assert sorted(found) == ["rank 0 of 2", "rank 1 of 2"], done.stdout
    return found


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    "framework", [pytest.param("accelerate", marks=pytest.mark.slow), "ignite", "timm", "torchtnt"]
)
def test_losses_of_one_process(program):
    for numbers in losses(TORCHMPIRUN, program, "torchmpi").values():
        assert numbers == pytest.approx(regression.losses_alone(), rel=1e-12)


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("framework", "arguments"),
    [("transformers", []), ("deepspeed", ["0"]), ("deepspeed", ["2"]), ("deepspeed", ["3"])],
)
def test_losses_of_gloo_under_torchrun(program, arguments):
    expected = losses(TORCHRUN, program, "gloo", *arguments)
    assert losses(TORCHMPIRUN, program, "torchmpi", *arguments) == expected


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_lightning_torchmetrics_and_compiled_functions():
    """On 3 ranks each compares with what it computes alone; it does not destroy the group before it ends."""
    pytest.importorskip("lightning")
    done = jobs.torchmpirun("-n", 3, HERE / "slow_frameworks.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3 agrees" for rank in range(3)]
