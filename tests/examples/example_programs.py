"""How tests start programs of examples/: each as its users do, or all that run on so many ranks in one job."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import jobs

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")
_ONE_AFTER_ANOTHER = Path(__file__).with_name("one_after_another.py")
_MARK = "== the next example"
pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
if not TORCHMPIRUN.exists():
    pytest.skip(f"no {TORCHMPIRUN}: install the package", allow_module_level=True)


def run(*command, fails=False, seconds=200, folder=None):
    """What a command prints."""
    done = jobs.run(*command, seconds=seconds, cwd=folder, stdin=subprocess.DEVNULL)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch(num_ranks, name, *options):
    """What an example prints on this many ranks, in a job of its own."""
    return run(TORCHMPIRUN, "-n", num_ranks, EXAMPLES / name, *options)


def example(num_ranks, command, *values, marks=()):
    """A case of a test: the command of a program that ``Jobs`` runs, and the test's other values."""
    return pytest.param(command, *values, marks=[pytest.mark.runs(num_ranks, command), *marks], id=command)


class Jobs:
    """One job for each number of ranks, started when first asked for: the programs of all chosen tests.

    A test names its commands by the mark ``runs(num_ranks, *commands)``. ``folder`` is their working directory.
    """

    def __init__(self, items, folder):
        self.folder = folder
        self._commands: dict[int, list[str]] = {}
        self._ended: dict[int, dict[str, str] | Exception] = {}
        for item in items:
            for mark in item.iter_markers("runs"):
                num_ranks, *commands = mark.args
                known = self._commands.setdefault(num_ranks, [])
                known += [command for command in commands if command not in known]

    def printed(self, num_ranks, command):
        """What the command prints on this many ranks. A job that failed is not run again."""
        if num_ranks not in self._ended:
            try:
                self._ended[num_ranks] = _run_together(num_ranks, self._commands[num_ranks], self.folder)
            except (AssertionError, subprocess.SubprocessError) as error:
                self._ended[num_ranks] = error
        outputs = self._ended[num_ranks]
        if isinstance(outputs, Exception):
            raise AssertionError(f"the job of {num_ranks} ranks failed") from outputs
        return outputs[command]


def _run_together(num_ranks, commands, folder):
    """What each of these commands prints, which the ranks of one job run one after the other in ``folder``."""
    programs = json.dumps([[str(EXAMPLES / name), *options] for name, *options in map(str.split, commands)])
    line = [TORCHMPIRUN, "-n", num_ranks, _ONE_AFTER_ANOTHER, _MARK, programs]
    _, *parts = run(*line, seconds=560, folder=folder).split(f"{_MARK}\n")
    return dict(zip(commands, parts, strict=True))
