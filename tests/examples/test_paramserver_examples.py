"""The examples with parameter servers, for a few epochs. Each one asserts itself what is special about it."""

import re

import pytest
from example_programs import example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("command", "num_ranks", "says"),
    [
        example(num_ranks, f"mnist_parameterserver_{words} --epochs 6", num_ranks, says)
        for num_ranks, words, says in (
            (3, "dsgd.py", "bit-identical on all 3 ranks"),
            (3, "synchronous.py", "after sgd at the server"),
            (3, "synchronous.py --optimizer adam --lr 0.002", "after adam at the server"),
            (3, "downpour.py", "the server's parameters"),
            (3, "easgd.py", "the centre, which has moved by"),
            (3, "easgd.py --momentum 0.9 --lr 0.01", "the centre, which has moved by"),
            (3, "ssp.py --pause 0.01 --init-delay 5", "the largest lead was"),
            (3, "hogwild.py", "all ranks share"),
            (3, "difference.py --ranks-per-node 2", "of 2 copies"),
            (4, "easgd_dataparallel.py", "2 workers, the first of 3 ranks"),
        )
    ],
)
def test_an_example_learns(jobs, command, num_ranks, says):
    output = jobs.printed(num_ranks, command)
    (accuracy,) = re.findall(r"accuracy ([\d.]+) %", output)  # printed once
    assert float(accuracy) > 80
    assert says in output
