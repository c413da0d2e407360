"""The lint of words (scripts/dev/words.py)."""

import runpy
from pathlib import Path

import pytest

LINT = runpy.run_path(str(Path(__file__).parents[1] / "scripts/dev/words.py"))
CASES = [
    ("page", "Wait until the deadline.\n", ["1 deadline -> timeout"]),
    ("page", "Write `deadline` in code.\n\n```python\ndeadline = 3; a; b\n```\n", []),
    ("page", "One; two;\nthree.\n\nOne; two.\n", ["1 2 semicolons in a paragraph -> at most one"]),
    ("page", f"{'word ' * 30}. {'Word ' * 30}.\n\n{'word ' * 31}.\n", ["3 a sentence of 31 words -> at most 30"]),
    ("module", '"""Of a tensor."""\n', ["1 a docstring begins with 'Of' -> a verb, or the noun returned"]),
    ("module", 'x = 1\n# Begin anew.\ny = f"{x}: the starter"\n', ["2 anew -> again", "3 starter -> mpirun"]),
    ("module", "def verb(deadline):\n    return deadline\n", []),
]


@pytest.mark.parametrize(("read", "text", "expected"), CASES)
def test_faults(read, text, expected):
    faults = [fault for part in LINT[read](text) if part for fault in LINT["faults"](part, False)]
    assert [f"{line} {fault}" for line, fault in sorted(faults)] == expected
