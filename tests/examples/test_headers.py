"""What all examples have: a header with their command and what it printed, and a test."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "digits_data")


@pytest.fixture(scope="module")
def tests():
    """The text of the tests; those of parameter servers leave the prefix of a name away."""
    files = [path for path in (ROOT / "tests").glob("**/test_*.py") if path != pathlib.Path(__file__)]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_a_header_with_its_output_and_a_test(example, tests):
    source = example.read_text(encoding="utf-8")
    header = ast.get_docstring(ast.parse(source))
    command = rf"^    (?:python|torchmpirun -n \d+(?: --groups \d+)?) examples/{example.name}.*\n"
    assert re.search(command + r"(?:    \.\.\.\n)?    \S*.*\d", header, re.MULTILINE), (
        "a command, and below it what it printed"
    )
    assert re.search(
        rf'"(mnist_parameterserver_)?{example.stem.removeprefix("mnist_parameterserver_")}(\.py)?\b', tests
    )
