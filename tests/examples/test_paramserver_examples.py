"""The examples with parameter servers, for a few epochs. Each one asserts itself what is special about it."""

import re

import pytest
from example_programs import example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def check(output, says):
    (accuracy,) = re.findall(r"accuracy ([\d.]+) %", output)  # printed once
    assert float(accuracy) > 80
    assert says in output


@pytest.mark.parametrize(
    ("command", "says"),
    [
        example(3, f"mnist_parameterserver_{words}", says)
        for words, says in (
            ("dsgd.py --epochs 6", "bit-identical on all 3 ranks"),
            ("synchronous.py --epochs 6", "after sgd at the server"),
            ("synchronous.py --epochs 6 --optimizer adam --lr 0.002", "after adam at the server"),
            ("downpour.py --epochs 6", "the server's parameters"),
            ("easgd.py --epochs 6", "the centre, which has moved by"),
            ("easgd.py --epochs 6 --momentum 0.9 --lr 0.01", "the centre, which has moved by"),
            ("ssp.py --epochs 6 --pause 0.01 --init-delay 5", "the largest lead was"),
            ("hogwild.py --epochs 6", "all ranks share"),
            ("difference.py --epochs 6 --ranks-per-node 2", "of 2 copies"),
        )
    ],
)
def test_an_example_learns(jobs, command, says):
    check(jobs.printed(3, command), says)


WORKERS = "mnist_parameterserver_easgd_dataparallel.py --epochs 6"


@pytest.mark.runs(4, WORKERS)
def test_workers_of_two_ranks(jobs):
    check(jobs.printed(4, WORKERS), "2 workers, the first of 3 ranks")
