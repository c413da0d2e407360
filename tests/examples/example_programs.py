"""How tests start programs of examples/: each as its users do, or all that run on so many ranks in one job."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")
_ONE_AFTER_ANOTHER = Path(__file__).with_name("one_after_another.py")
_MARK = "== the next example"
pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
if not TORCHMPIRUN.exists():
    pytest.skip(f"no {TORCHMPIRUN}: install the package", allow_module_level=True)


def run(*command, fails=False, seconds=200, folder=None):
    """What a command prints."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=seconds, cwd=folder,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch(num_ranks, name, *options):
    """What an example prints on this many ranks, in a job of its own."""
    return run(TORCHMPIRUN, "-n", num_ranks, EXAMPLES / name, *options)


def example(num_ranks, command, *values):
    """A case of a test: the command of a program that ``Jobs`` runs, and the test's other values."""
    return pytest.param(command, *values, marks=pytest.mark.runs(num_ranks, command), id=command)


@dataclass(frozen=True)
class Jobs:
    """One job for each number of ranks, started when first asked for: the programs of all chosen tests.

    A test names its commands by the mark ``runs(num_ranks, *commands)``. ``folder`` is the working directory.
    """

    commands: dict[int, list[str]]
    folder: Path
    outputs_of: Callable[[int], dict[str, str]]

    @classmethod
    def of(cls, items, folder):
        commands: dict[int, list[str]] = {}
        for item in items:
            for mark in item.iter_markers("runs"):
                num_ranks, *named = mark.args
                known = commands.setdefault(num_ranks, [])
                known += [command for command in named if command not in known]
        run_all = functools.cache(lambda num_ranks: _run_together(num_ranks, commands[num_ranks], folder))
        return cls(commands, folder, run_all)

    def printed(self, num_ranks, command):
        """What the command prints on this many ranks."""
        return self.outputs_of(num_ranks)[command]


def _run_together(num_ranks, commands, folder):
    """What each of these commands prints, which the ranks of one job run one after the other in ``folder``."""
    words = [command.split() for command in commands]
    programs = json.dumps([[str(EXAMPLES / name), *options] for name, *options in words])
    line = [TORCHMPIRUN, "-n", num_ranks, _ONE_AFTER_ANOTHER, _MARK, programs]
    _, *parts = run(*line, seconds=560, folder=folder).split(f"{_MARK}\n")
    return dict(zip(commands, parts, strict=True))
