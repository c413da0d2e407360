"""``benchmarks/mpis.py``: its jobs, by stand-ins and once in truth, and its table, from constructed reports."""

import dataclasses
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support import jobs

from torchmpi_py.bench import command_line, results
from torchmpi_py.bench.candidates import COPY, GLOO, RAW_MPI
from torchmpi_py.bench.results import Report, ResultRow

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "mpis.py"
mpis = runpy.run_path(str(PROGRAM))
PAIRS = f"open={sys.executable},ch={sys.executable}"


def run(monkeypatch, *words):
    """The exit code of the program."""
    monkeypatch.setattr("sys.argv", ["mpis.py", *map(str, words)])
    return command_line.exit_code(mpis["main"])


def report(microseconds, notes=(), mpi="Some MPI 7"):
    """A report at one size; a candidate whose time is None was left out."""
    known = {what: number for what, number in microseconds.items() if number is not None}
    rows = [ResultRow(8, what, "warm", number * 1e-6, number * 1e-6, 7) for what, number in known.items()]
    facts = {"cores": "2", "MPI": mpi, "torch": "9.1"}
    return Report("allreduce", "float32", "sum", 2, facts, list(notes), rows)


def times(selector, symmetric, raw, gloo=900):
    return {"selector": selector, "symmetric": symmetric, RAW_MPI: raw, GLOO: gloo, COPY: 0.1}


def test_a_line_for_each_size_has_the_median_of_the_rounds_and_ratios_to_the_best_raw_mpi():
    of_open = [report(times(*each), ["a remark"]) for each in [(4, 3, 5), (900, 1, 8), (6, 2, 6, 300)]]
    of_ch = [report(times(2, 1, 4), mpi="Another MPI")] * 3
    text = mpis["render"](mpis["MpisReport"]({"open": of_open, "ch": of_ch}))
    assert text.startswith("# allreduce (sum) of float32, several MPIs\n")
    assert "- open: Some MPI 7, torch 9.1\n- ch: Another MPI, torch 9.1\n- rounds: 3" in text
    assert text.endswith("Note: open: a remark.")
    header, _, line = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[0:1] == "|"
    ]
    assert dict(zip(header, line, strict=True)) == {
        "bytes": "8",
        "buffers": "warm",
        "raw open": "6.00",
        "raw ch": "4.00",
        "gloo": "900",
        "selector open": "6.00",
        "selector ch": "2.00",
        "symmetric open": "2.00",
        "symmetric ch": "1.00",
        "selector / best raw": "1.50, 0.500",
        "symmetric / best raw": "0.500, 0.250",
    }


def test_jobs_take_turns_with_the_options_of_compare(monkeypatch, tmp_path, capsys):
    commands = []

    def run_job(command, **_):
        commands.append(command)
        results.store(results.COLLECTIVE, report(times(2, 1, 4)), Path(command[-1]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run_job)
    kept = ["--sizes", "4,8", "--buffers", "cold", "--no-verify", "--seconds", "0.5"]
    words = [*kept[:2], "--mpi", PAIRS, "-n", "3", *kept[2:], "--round", "2", f"--json={tmp_path / 'm.json'}"]
    assert run(monkeypatch, *words) == 0
    assert len(commands) == 4
    launch, rest = commands[0][:8], commands[0][8:-2]
    assert launch == [sys.executable, *["-m", "torchmpi_py.launch", "-n", "3", "--timeout", "160.0", "-m"]]
    assert rest == ["torchmpi_py.bench", "compare", *mpis["_DEFAULTS"], *kept]
    stored = json.loads((tmp_path / "m.json").read_text())["reports"]
    assert {name: len(reports) for name, reports in stored.items()} == {"open": 2, "ch": 2}
    assert stored["ch"][1] == dataclasses.asdict(report(times(2, 1, 4)))
    assert capsys.readouterr().out.count("| raw open |") == 1


@pytest.mark.parametrize("code", [1, 2])
def test_a_job_that_fails_ends_the_command_with_its_name(monkeypatch, capsys, code):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code))
    assert run(monkeypatch, "--mpi", PAIRS, "-n", 2) == code
    assert f"the job of open ended with exit code {code}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"--mpi {PAIRS}", "arguments are required: -n"),
        ("-n 2 --mpi openmpi", "'openmpi': write NAME=PYTHON"),
        ("-n 2 --mpi a=/nowhere/python", "'a=/nowhere/python': write NAME=PYTHON"),
        (f"-n 2 --mpi {PAIRS},ch={sys.executable}", "write NAME=PYTHON, a name of its own"),
        (f"-n 2 --mpi {PAIRS} --verb foo", "'foo'"),
        (f"-n 2 --mpi {PAIRS} --json /nowhere/x.json", "cannot write /nowhere/x.json"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(monkeypatch, capsys, words, message):
    assert run(monkeypatch, *words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@jobs.needs_mpi
def test_two_environments_in_truth(tmp_path):
    words = ["--mpi", PAIRS, "-n", 2, "--rounds", 1, "--sizes", "4,1K", "--seconds", 0.01]
    done = jobs.run(sys.executable, PROGRAM, *words, "--json", tmp_path / "m.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n|") == 4
    stored = json.loads((tmp_path / "m.json").read_text())["reports"]
    whats = {row["what"] for (each,) in stored.values() for row in each["rows"]}
    assert {"selector", "symmetric", RAW_MPI} <= whats
