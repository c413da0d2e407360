"""The examples for people who come from another framework: the losses and accuracies of one process."""

import importlib.util
import re

import pytest
from example_programs import example, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def accuracy(output, num_ranks):
    """In percent, printed once."""
    ((ranks, found),) = re.findall(r"(\d) ranks.* accuracy ([\d.]+) %", output)
    assert int(ranks) == num_ranks
    return float(found)


OWN_LOOPS = ["own_loop.py --epochs 3", "own_loop.py --epochs 3 --asynchronous"]


@pytest.mark.runs(1, *OWN_LOOPS)
@pytest.mark.runs(3, *OWN_LOOPS)
@pytest.mark.parametrize("command", OWN_LOOPS)
def test_a_loop_of_ones_own_takes_the_steps_of_one_process(jobs, command):
    """A batch of 60 on 3 ranks and on 1: the same samples, the same mean gradient."""
    alone, together = (jobs.printed(num_ranks, command) for num_ranks in (1, 3))
    losses = [float(re.search(r"loss ([\d.]+)", output)[1]) for output in (alone, together)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert accuracy(together, 3) == pytest.approx(accuracy(alone, 1), abs=1.5)


@pytest.mark.parametrize(
    "command",
    [example(3, "horovod_style.py --epochs 6"), example(3, "horovod_style.py --epochs 6 --compression fp16 --clip 5")],
)
def test_a_script_for_horovod(jobs, command):
    assert accuracy(jobs.printed(3, command), 3) > 80


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers: scripts/test_programs")
def test_the_trainer_of_transformers():
    output = launch(2, "transformers_trainer.py", "--epochs", 12)
    assert "'torchmpi'" in output
    assert accuracy(output, 2) > 70
