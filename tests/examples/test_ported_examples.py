"""The examples for people who come from another framework: the losses and accuracies of one process."""

import importlib.util
import re

import pytest
from example_programs import start

pytestmark = pytest.mark.timeout(240)


def example(num_ranks, name, *options):
    """What rank 0 of this many ranks prints."""
    done = start(num_ranks, name, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(output, num_ranks):
    """In percent, printed once."""
    ((ranks, found),) = re.findall(r"(\d) ranks.* accuracy ([\d.]+) %", output)
    assert int(ranks) == num_ranks
    return float(found)


@pytest.mark.parametrize("options", [[], ["--asynchronous"]], ids=["after", "during"])
def test_a_loop_of_ones_own_takes_the_steps_of_one_process(options):
    """A batch of 60 on 3 ranks and on 1: the same samples, the same mean gradient."""
    alone, together = (example(n, "own_loop.py", "--epochs", 3, *options) for n in (1, 3))
    losses = [float(re.search(r"loss ([\d.]+)", output)[1]) for output in (alone, together)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert accuracy(together, 3) == pytest.approx(accuracy(alone, 1), abs=1.5)


@pytest.mark.parametrize("options", [[], ["--compression", "fp16", "--clip", "5"]], ids=["plain", "fp16"])
def test_a_script_for_horovod(options):
    assert accuracy(example(3, "horovod_style.py", "--epochs", 6, *options), 3) > 80


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers: scripts/test_programs")
def test_the_trainer_of_transformers():
    output = example(2, "transformers_trainer.py", "--epochs", 12)
    assert "'torchmpi'" in output
    assert accuracy(output, 2) > 70


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning():
    assert accuracy(example(2, "lightning_digits.py", "--epochs", 4), 2) > 70
