"""The examples with parameter servers, for a few epochs. Each one asserts itself what is special about it."""

import re

import pytest
from example_programs import commands_of, launch, run_together

pytestmark = pytest.mark.timeout(600)


def check(output, says):
    (accuracy,) = re.findall(r"accuracy ([\d.]+) %", output)  # printed once
    assert float(accuracy) > 80
    assert says in output


@pytest.fixture(scope="module")
def printed(request):
    """What the programs print on 3 ranks, by their commands."""
    return run_together(3, commands_of(request))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (f"mnist_parameterserver_{words}", says)
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
def test_an_example_learns(printed, command, says):
    check(printed[command], says)


def test_workers_of_two_ranks():
    output = launch(4, "mnist_parameterserver_easgd_dataparallel.py", "--epochs", 6)
    check(output, "2 workers, the first of 3 ranks")
