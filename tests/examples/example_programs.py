"""How tests start programs of examples/: each as its users do, or several in one job."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")
_ONE_AFTER_ANOTHER = Path(__file__).with_name("one_after_another.py")
_MARK = "== the next example"
pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
if not TORCHMPIRUN.exists():
    pytest.skip(f"no {TORCHMPIRUN}: install the package", allow_module_level=True)


def run(*command, fails=False, seconds=200):
    """What a command prints."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch(num_ranks, name, *options):
    """What an example prints on this many ranks."""
    return run(TORCHMPIRUN, "-n", num_ranks, EXAMPLES / name, *options)


def run_together(num_ranks, commands):
    """What each of these commands prints, which the ranks of one job run one after the other."""
    words = [command.split() for command in commands]
    programs = json.dumps([[str(EXAMPLES / name), *options] for name, *options in words])
    output = run(TORCHMPIRUN, "-n", num_ranks, _ONE_AFTER_ANOTHER, _MARK, programs, seconds=560)
    _, *parts = output.split(f"{_MARK}\n")
    return dict(zip(commands, parts, strict=True))


def commands_of(request):
    """The parameters ``command`` of a module's tests, as far as they are chosen."""
    chosen = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    return list(dict.fromkeys(item.callspec.params["command"] for item in chosen if "command" in item.callspec.params))
