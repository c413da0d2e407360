"""The examples with parameter servers, for a few epochs. Each one asserts itself what is special about it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)
EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'torchmpi-py[examples]'")
if not TORCHMPIRUN.exists():
    pytest.skip(f"no {TORCHMPIRUN}: install the package", allow_module_level=True)


def example(num_ranks, name, *options):
    command = [TORCHMPIRUN, "-n", num_ranks, EXAMPLES / f"mnist_parameterserver_{name}.py", *options]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout + done.stderr


def accuracy(output):
    """In percent, printed once."""
    (found,) = re.findall(r"accuracy ([\d.]+) %", output)
    return float(found)


@pytest.mark.parametrize(
    ("name", "num_ranks", "options", "says"),
    [
        ("dsgd", 3, "", "bit-identical on all 3 ranks"),
        # where ranks share cores each takes turns of many steps: momentum then carries it far from the others
        ("downpour", 3, "--momentum 0 --lr 0.1 --update-frequency 5", "the server's parameters"),
        ("easgd", 3, "", "the centre, which has moved by"),
        ("easgd_dataparallel", 4, "", "2 workers, the first of 3 ranks"),
        ("ssp", 3, "--slow 0.01 --init-delay 5", "the largest lead was"),
        ("hogwild", 3, "", "all ranks share"),
    ],
    ids=["dsgd", "downpour", "easgd", "easgd_dataparallel", "ssp", "hogwild"],
)
def test_an_example_learns(name, num_ranks, options, says):
    code, output = example(num_ranks, name, "--epochs", 6, "--at-least", 0.8, *options.split())
    assert code == 0, output
    assert accuracy(output) > 80
    assert says in output


def test_too_low_an_accuracy_is_an_error():
    code, output = example(1, "downpour", "--epochs", 1, "--at-least", 0.99)
    assert code != 0
    assert "0.99 was to be reached" in output
