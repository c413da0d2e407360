"""Plant faults in the package, one at a time, and see whether the tests find them.

    python scripts/dev/mutants.py --number 60 --seed 1            # draw, plant, test; a Markdown table
    python scripts/dev/mutants.py --number 60 --seed 1 --list     # only show the faults

A fault is a small change of the syntax tree: a call that is left out, a comparison or a condition that is turned round,
a number that is off by one, another operator. Faults are drawn from a seed, evenly over the rooms (folders of
``torchmpi_py``). Each is planted in a copy of the checkout and tested there, by the tests of the room and of the rooms
in ``ALSO``, on one process and on 2 ranks; with ``--all`` also by tests marked slow, and on 3 ranks. A fault is *found*
when tests fail, hang, or cannot be collected.

Why not mutmut or cosmic-ray: they run one command in one process; tests on ranks need a launcher, which has to see the
fault as well as the ranks do.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-test"
ALSO = {"core": ["collectives", "watch"], "memory": ["collectives"], "watch": ["core"], "runtime": ["launch"]}
SECONDS = 900  # for the tests of one fault
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Fault(NamedTuple):
    """A change of one node of a file's syntax tree."""

    path: Path
    line: int
    text: str
    source: str  # of the whole file, with the fault


def positions(path: Path) -> list[int]:
    """The nodes of a file, by their position in ``ast.walk``, that have a fault."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [position for position, node in enumerate(nodes) if change(copy.deepcopy(node)) is not None]


def fault_at(path: Path, position: int) -> Fault:
    """The fault of one node."""
    tree = ast.parse(path.read_text())
    node = list(ast.walk(tree))[position]
    text = change(node)
    assert text is not None
    return Fault(path, getattr(node, "lineno", 0), text, ast.unparse(tree))


def change(node: ast.AST) -> str | None:
    """Change a node in place, and return what was changed; None for a node that stays."""
    if isinstance(node, (ast.FunctionDef, ast.If, ast.For, ast.While, ast.With)):
        for index, statement in enumerate(node.body):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                node.body[index] = ast.Pass()
                return f"left out: {ast.unparse(statement)}"
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not _is_for_types(node.test):
        before = ast.unparse(node.test)
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return f"turned round: {before}"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        before = ast.unparse(node)
        node.ops[0] = _SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
        return f"{before}  ->  {ast.unparse(node)}"
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPS and not _has_text(node):
        before = ast.unparse(node)
        node.op = _SWAPS[type(node.op)]()  # type: ignore[assignment]
        return f"{before}  ->  {ast.unparse(node)}"
    if isinstance(node, (ast.Slice, ast.Subscript)):
        return _off_by_one(node)
    return None


def _off_by_one(node: ast.Slice | ast.Subscript) -> str | None:
    part = node.lower if isinstance(node, ast.Slice) else node.slice
    if not (isinstance(part, ast.Constant) and type(part.value) is int):
        return None
    before = ast.unparse(node)
    part.value += 1
    return f"{before}  ->  {ast.unparse(node)}"


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _has_text(node: ast.AST) -> bool:
    """Whether a string takes part: a message with a fault is no fault of the program."""
    return any(isinstance(each, (ast.JoinedStr, ast.Constant)) and _is_text(each) for each in ast.walk(node))


def _is_text(node: ast.JoinedStr | ast.Constant) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node.value, (str, bytes))


def draw(number: int, seed: int) -> list[Fault]:
    """Faults from all rooms in turn."""
    generator = random.Random(seed)
    rooms = sorted(path for path in (ROOT / "torchmpi_py").iterdir() if path.is_dir() and any(path.glob("*.py")))
    chosen: list[Fault] = []
    while len(chosen) < number:
        for room in rooms[: number - len(chosen)]:
            path = generator.choice(sorted(room.glob("*.py")))
            if found := positions(path):
                chosen.append(fault_at(path, generator.choice(found)))
    return chosen


def test(fault: Fault, *, is_all: bool) -> str:
    """Plant a fault in a copy of the checkout, and return which part of the tests has found it; "" for none."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "checkout"
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
        (copied / fault.path.relative_to(ROOT)).write_text(fault.source)
        room = fault.path.relative_to(ROOT / "torchmpi_py").parts[0]
        folders = [f"tests/{name}" for name in [room, *ALSO.get(room, [])] if (ROOT / "tests" / name).is_dir()]
        options = ["-m", "pytest", "-q", "-x", "--color=no", *["--all"] * is_all]
        parts = {"one process": [str(VENV / "bin/python"), *options, "--short-programs", *folders]}
        for ranks in (2, 3) if is_all else (2,):
            launcher = [str(VENV / "bin/torchmpirun"), "-n", str(ranks), "--timeout", str(SECONDS)]
            parts[f"{ranks} ranks"] = [*launcher, *options, "--capture=sys", "--only-mpi", *folders]
        for name, command in parts.items():
            if not _passes(command, copied):
                return name
    return ""


def _passes(command: list[str], folder: Path) -> bool:
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as tests:
        try:
            return tests.wait(SECONDS) in (0, 5)  # 5: there are no tests of this kind
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, signal.SIGKILL)
            return False


def main() -> int:
    """Draw faults, and print which of them the tests find."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="with tests marked slow, and on 3 ranks")
    parser.add_argument("--list", action="store_true", help="only show the faults")
    options = parser.parse_args()
    print("| file, line | fault | found by |\n| --- | --- | --- |")
    faults, num_found = draw(options.number, options.seed), 0
    for fault in faults:
        found = "" if options.list else test(fault, is_all=options.all)
        num_found += bool(found)
        text = fault.text.replace("|", "\\|")
        print(f"| {fault.path.relative_to(ROOT)}:{fault.line} | `{text}` | {found or '-'} |", flush=True)
    if not options.list:
        print(f"\n{num_found} of {len(faults)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
