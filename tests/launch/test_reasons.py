"""The reason of a failure reaches torchmpirun's stderr: each way to raise, in each state of the rank's stderr."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import jobs

from torchmpi_py.launch import wrap

pytestmark = pytest.mark.timeout(240)
RANK = [sys.executable, wrap.__file__, "--bind", "none"]

# The state of stderr when the rank fails.
STATES = {
    "normal": "",
    "a buffer": "sys.stderr = io.StringIO()",
    "None": "sys.stderr = None",
    "closed": "sys.stderr.close()",
    "descriptor closed": "os.close(2)",
    "both closed": "sys.stderr.close(); os.close(2)",
    "write raises": "sys.stderr = types.SimpleNamespace(write=int, flush=dict)",
    "a tee": "sys.stderr = types.SimpleNamespace(write=sys.stderr.write, flush=sys.stderr.flush)",
    "redirected": "where = contextlib.redirect_stderr(io.StringIO()); where.__enter__()",
    "descriptor redirected": "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)",
    "own excepthook": "sys.excepthook = lambda kind, error, _: print('hook:', kind.__name__, error, file=sys.stderr)",
}

# Ways to fail, and the class that is shown. In the last one a signal comes during the report, and its handler raises,
# as torch's handler does for a worker that dies.
THREAD = "thread = threading.Thread(target=lambda: [][0])\nthread.start()\nthread.join()"
WAYS = {
    "raise": ("raise LookupError('boom')", "LookupError"),
    "exit": ("sys.exit('boom')", ""),
    "thread": (f"{THREAD}\nraise LookupError('boom')", "LookupError"),
    "handler": ("raise Disturbing", "Disturbing"),
}

PROGRAM = """
import contextlib, io, os, signal, sys, threading, time, types

def raise_disturbed(*_):
    raise OSError("disturbed")

class Disturbing(LookupError):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGALRM)
        return "boom"

signal.signal(signal.SIGALRM, raise_disturbed)
"""


def outcomes_of(cells, folder, command):
    """How often the reason is shown, and the exit code, of each way to fail in a state."""

    def outcome_of(cell):
        (text, kind), state = WAYS[cell[0]], STATES[cell[1]]
        job = jobs.run(*command, jobs.write(folder, f"{PROGRAM}\n{state}\n{text}\n", f"{'-'.join(cell)}.py"))
        shown = re.findall(rf"^(?:hook: )?{kind}:? ?boom$" if kind else "^boom$", job.stderr, re.M)
        return len(shown), job.returncode

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cells, pool.map(outcome_of, cells), strict=True))


def test_a_rank_shows_each_reason_in_each_state_of_stderr(tmp_path):
    cells = [(way, state) for way in WAYS for state in STATES]
    assert outcomes_of(cells, tmp_path, RANK) == dict.fromkeys(cells, (1, 1))


def test_a_rank_shows_that_no_descriptor_is_left(tmp_path):
    path = jobs.write(tmp_path, "files = []\nwhile True:\n    files.append(open('/dev/null'))")
    rank = jobs.run(*RANK, path)
    assert rank.returncode == 1
    assert rank.stderr.count("OSError: [Errno 24]") == 1


@jobs.needs_mpi
def test_the_starter_passes_the_reason_on(tmp_path):
    cells = [("handler", "a tee"), ("raise", "both closed"), ("exit", "None")]
    assert outcomes_of(cells, tmp_path, [*jobs.TORCHMPIRUN, "-n", "1"]) == dict.fromkeys(cells, (1, 1))
