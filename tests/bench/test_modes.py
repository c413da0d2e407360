"""The program ``benchmarks/modes``, run short as its users run it; its arithmetic; the page that it writes into."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support import jobs

ROOT = Path(__file__).parents[2]
MODES = ROOT / "benchmarks" / "modes"
PAGE = "before\n<!-- table: python benchmarks/modes -->\nold\n<!-- end of the table -->\nafter\n"
pytestmark = pytest.mark.timeout(950)


def run(*words):
    return jobs.run(sys.executable, MODES, *words, seconds=900, stdin=subprocess.DEVNULL)


@pytest.fixture
def module(monkeypatch):
    """The names in a module of the program, by the name of the module; the program is no package."""
    monkeypatch.syspath_prepend(MODES)
    return lambda name: runpy.run_path(str(MODES / f"{name}.py"))


@pytest.fixture
def report(module):
    """A report of two modes and two seeds, of which one mode was run with a pause too."""
    runs = [
        {"mode": mode, "seed": seed, "pause_seconds": pause, "seconds": [1.0, 2.0 + seed + pause], "num_bytes": 3e6}
        | {"accuracy": [0.5, accuracy + seed / 100]}
        for mode, pause, accuracy in (("twin", 0, 0.9), ("a", 0, 0.88), ("a", 4, 0.8), ("b", 0, 0.91))
        for seed in (0, 1)
    ]
    modes = [
        {"name": name, "origin": "x", "program": "p.py", "options": options, "twin": ""}
        for name, options in (("a", ""), ("b", "--c 1"))
    ]
    settings, facts = {"ranks": 3, "seeds": 2, "epochs": 2}, {"cores": "2", "torch": "2.13.0", "date": "2026-11-29"}
    return module("page")["Report"](settings, facts, modes, runs)


@pytest.mark.slow
@jobs.needs_mpi
def test_modes_are_run_beside_their_twin_and_written_down(tmp_path):
    for needed in ("sklearn", "matplotlib"):
        pytest.importorskip(needed, reason="pip install '.[examples,bench]'")
    page = tmp_path / "modes.md"
    page.write_text(PAGE)
    short = ["--epochs", "1", "--seeds", "1", "--ranks", "2", "--batch", "240", "--pause", "0.05"]
    done = run("--modes", "allreduce,hogwild,dsgd", *short, "--out", tmp_path, "--docs", page)
    (stored,) = tmp_path.glob("modes_2ranks_*.json")
    even = {one["mode"]: one for one in json.loads(stored.read_text())["runs"] if not one["pause_seconds"]}
    assert set(even) == {"twin", "allreduce", "hogwild", "dsgd"}, done.stderr
    assert even["allreduce"]["accuracy"] == pytest.approx(even["twin"]["accuracy"], abs=0.01)
    # six steps; a rank of two sends as many bytes as there are, once in an allreduce and twice by a server
    num_bytes = 4 * (16 * 10 + 32 * 145 + 64 * 513 + 10 * 65)
    assert 6 < even["allreduce"]["num_bytes"] / num_bytes < 8
    assert even["hogwild"]["num_bytes"] < num_bytes < even["dsgd"]["num_bytes"]
    for text in (stored.with_suffix(".md").read_text(), page.read_text()):
        assert all(f"| {name} " in text for name in ("allreduce", "hogwild", "dsgd"))
    assert stored.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert stored.with_suffix(".png").name in page.read_text()
    assert done.returncode == int("points from the twin" in done.stderr)  # hogwild's, after one epoch, may be far


def test_the_table_takes_the_place_of_the_one_before(module, report, tmp_path):
    rows = module("page")["rows"](report)
    assert [row.command for row in rows] == ["torchmpirun -n 3 examples/p.py", "torchmpirun -n 3 examples/p.py --c 1"]
    page = tmp_path / "docs.md"
    page.write_text(PAGE)
    for _ in range(2):
        module("page")["insert"](report, page, tmp_path / "out" / "p.png")
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("(out/p.png)") == text.count("| a ") == 1
    shown = [" ".join(line.replace("|", " ").split()[1:]) for line in text.splitlines() if line[:4] in ("| a ", "| b ")]
    # accuracy (points above the twin), seconds (with a pause), MB
    assert shown == ["88.50 (-2.00) 2.50 (6.00) 3.00", "91.50 (+1.00) 2.50 (-) 3.00"]
    assert "3 ranks on 2 cores, torch 2.13.0, 2 seeds, 2 epochs\n([report](out/p.md))" in text


def test_every_mode_stands_in_the_docs_with_a_program_that_exists(module):
    modes = module("table")["MODES"]
    text = (ROOT / "docs" / "strategies.md").read_text()
    shown = re.findall(r"^- \*\*(.+?)\*\* \(`(.+?)`\):", text, re.MULTILINE)
    assert sorted(shown) == sorted((mode.name, f"{mode.program} {mode.options}".rstrip()) for mode in modes)
    assert {mode.program for mode in modes} <= {file.name for file in (ROOT / "examples").glob("*.py")}
