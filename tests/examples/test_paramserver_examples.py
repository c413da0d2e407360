"""The examples with parameter servers, for a few epochs. Each one asserts itself what is special about it."""

import re

import pytest
from example_programs import start

pytestmark = pytest.mark.timeout(240)


def example(num_ranks, name, *options):
    done = start(num_ranks, f"mnist_parameterserver_{name}.py", *options)
    return done.returncode, done.stdout + done.stderr


def accuracy(output):
    """In percent, printed once."""
    (found,) = re.findall(r"accuracy ([\d.]+) %", output)
    return float(found)


@pytest.mark.parametrize(
    ("name", "num_ranks", "options", "says"),
    [
        ("dsgd", 3, "", "bit-identical on all 3 ranks"),
        ("synchronous", 3, "", "after sgd at the server"),
        ("synchronous", 3, "--optimizer adam --lr 0.002", "after adam at the server"),
        ("downpour", 3, "", "the server's parameters"),
        ("easgd", 3, "", "the centre, which has moved by"),
        ("easgd", 3, "--momentum 0.9 --lr 0.01", "the centre, which has moved by"),
        ("easgd_dataparallel", 4, "", "2 workers, the first of 3 ranks"),
        ("ssp", 3, "--pause 0.01 --init-delay 5", "the largest lead was"),
        ("hogwild", 3, "", "all ranks share"),
        ("difference", 3, "--ranks-per-node 2", "of 2 copies"),
    ],
)
def test_an_example_learns(name, num_ranks, options, says):
    code, output = example(num_ranks, name, "--epochs", 6, *options.split())
    assert code == 0, output
    assert accuracy(output) > 80
    assert says in output
