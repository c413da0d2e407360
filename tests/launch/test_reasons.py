"""The reason of a failure reaches torchmpirun's stderr: each way to raise, in each state of the rank's stderr."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import mpirun, wrap

try:
    mpirun.find("", os.environ)
    MISSING = ""
except LaunchError as error:
    MISSING = str(error)

pytestmark = pytest.mark.timeout(240)

# The state of stderr when the rank fails.
STATES = {
    "normal": "",
    "a buffer": "sys.stderr = io.StringIO()",
    "None": "sys.stderr = None",
    "closed": "sys.stderr.close()",
    "descriptor closed": "os.close(2)",
    "both closed": "sys.stderr.close(); os.close(2)",
    "write raises": "sys.stderr = types.SimpleNamespace(write=int, flush=dict)",
    "a tee": "sys.stderr = Tee(sys.stderr)",
    "redirected": "where = contextlib.redirect_stderr(io.StringIO()); where.__enter__()",
    "descriptor redirected": "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)",
    "own excepthook": "sys.excepthook = lambda kind, error, _: print('hook:', kind.__name__, error, file=sys.stderr)",
}

# Ways to fail, and the class that is shown. In the last one a signal comes during the report, and its handler raises,
# as torch's handler does for a worker that dies.
WAYS = {
    "raise": ("raise LookupError('boom')", "LookupError"),
    "exit": ("sys.exit('boom')", ""),
    "thread": ("join(lambda: [][0])\nraise LookupError('boom')", "LookupError"),
    "handler": ("raise Disturbing", "Disturbing"),
}

PROGRAM = """
import contextlib, io, os, signal, sys, threading, time, types

class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)
    def flush(self):
        self.stream.flush()

def join(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

def raise_disturbed(*_):
    raise OSError("disturbed")

class Disturbing(LookupError):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGALRM)
        return "boom"

signal.signal(signal.SIGALRM, raise_disturbed)
"""


def outcome_of(cell, folder, command):
    """How often the reason is shown, and the exit code."""
    way, state = cell
    program = folder / f"{way}-{state}.py"
    program.write_text(f"{PROGRAM}\n{STATES[state]}\n{WAYS[way][0]}\n")
    job = subprocess.run([*command, program], capture_output=True, text=True, timeout=100, check=False)
    kind = WAYS[way][1]
    shown = re.findall(rf"^(?:hook: )?{kind}:? ?boom$" if kind else "^boom$", job.stderr, re.M)
    return len(shown), job.returncode


def outcomes_of(cells, folder, command):
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda cell: outcome_of(cell, folder, command), cells)
        return dict(zip(cells, outcomes, strict=True))


def test_a_rank_shows_each_reason_in_each_state_of_stderr(tmp_path):
    cells = [(way, state) for way in WAYS for state in STATES]
    outcomes = outcomes_of(cells, tmp_path, [sys.executable, wrap.__file__, "--bind", "none"])
    assert outcomes == dict.fromkeys(cells, (1, 1))


def test_a_rank_shows_that_no_descriptor_is_left(tmp_path):
    (tmp_path / "a.py").write_text("files = []\nwhile True:\n    files.append(open('/dev/null'))")
    command = [sys.executable, wrap.__file__, "--bind", "none", tmp_path / "a.py"]
    job = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert job.returncode == 1
    assert job.stderr.count("OSError: [Errno 24]") == 1


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_starter_passes_the_reason_on(tmp_path):
    cells = [("handler", "a tee"), ("raise", "both closed"), ("exit", "None")]
    outcomes = outcomes_of(cells, tmp_path, [sys.executable, "-m", "torchmpi_py.launch", "-n", "1"])
    assert outcomes == dict.fromkeys(cells, (1, 1))
