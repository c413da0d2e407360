"""Cells whose ranks wait for each other, do not heed an interrupt, or outlive their kernel."""

import os
import signal
import sys
import time

import pytest
from shells import both_are_in, interrupt_when, touch, wait_for_end
from support import jobs

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow, jobs.needs_mpi]


def test_who_waits_for_a_rank_that_failed_is_freed(notebook):
    output = notebook.fails("if mpi.rank() == 1: raise ValueError('no data')\nmpi.allreduce(torch.ones(3))")
    assert "ValueError: no data" in output
    assert "rank 1 of 2 failed\nrank 0 waited in allreduce (Cell In[" in output
    assert "different numbers of collectives" in output
    assert "CommunicatorError" in notebook.fails("mpi.allreduce(torch.ones(3))")
    assert notebook.good("2 + 2") == "[0-1] 4\n"
    notebook.run("%torchmpi restart")
    assert "NameError" in notebook.fails("x")
    assert notebook.good("mpi.allreduce(1)") == "[0-1] 2\n"


# In a collective an interrupt counts from the moment in which the last rank has called it.
WATCHED = """
import threading, time
from torchmpi_py.core import journal, status_board

def report():
    while not ({ready} or journal.under_way(status_board.current)):
        time.sleep(0.01)
    {touch}

threading.Thread(target=report, daemon=True).start()
{work}
"""


@pytest.mark.parametrize(
    ("work", "is_in_step"),
    [
        ("while True: sum(range(1000))", True),
        ("time.sleep(1000)", True),
        ("mpi.allreduce(torch.ones(5)) if mpi.rank() else time.sleep(1000)", False),
        ("mpi.allreduce(torch.ones(1 << 20)) if mpi.rank() else time.sleep(1000)", False),
        ("mpi.barrier() if mpi.rank() else time.sleep(1000)", False),
    ],
    ids=["computing", "sleeping", "waiting", "large", "barrier"],
)
def test_an_interrupt_reaches_all_ranks(notebook, tmp_path, work, is_in_step):
    interrupt_when(both_are_in(tmp_path))
    ready = "True" if is_in_step else "mpi.rank() == 0"
    output = notebook.fails(WATCHED.format(ready=ready, touch=touch(tmp_path), work=work))
    assert "KeyboardInterrupt" in output
    assert "rank_program.py" not in output
    assert "cannot be interrupted" not in output
    assert "ranks 0-1 of 2 failed" in output
    assert ("different numbers of collectives" in output) != is_in_step
    assert notebook.good("mpi.rank()") == "0\n[1] 1\n"
    if not is_in_step:
        notebook.run("%torchmpi restart")


def test_a_rank_that_cannot_be_interrupted_is_named(notebook, tmp_path):
    interrupt_when(both_are_in(tmp_path))
    work = "if mpi.rank() == 0: mpi.split(0)"
    output = notebook.fails(WATCHED.format(ready="mpi.rank() == 1", touch=touch(tmp_path), work=work))
    assert "rank 0 cannot be interrupted: split (Cell In[" in output
    lines = notebook.run("%torchmpi status")[0].splitlines()
    assert "in split" in lines[0]
    assert lines[1].endswith("idle")
    output = notebook.cell("1")[0]
    assert "rank 0" in output + str(notebook.result.error_in_exec)
    assert not notebook.result.success
    notebook.run("%torchmpi restart")
    assert notebook.good("mpi.size()") == "[0-1] 2\n"


KERNEL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
for cell in ("%load_ext torchmpi_py.notebook", "%%torchmpi -n 2\\npass", "%torchmpi status"):
    shell.run_cell(cell)
if sys.argv[1:]: shell.run_cell('%%torchmpi\\nwhile True: pass')
"""


@pytest.mark.parametrize("words", [[], ["busy"]])
def test_the_end_of_the_kernel_ends_the_ranks(tmp_path, words):
    """In order, with an idle job; and by signal 9, while a cell runs."""
    command = [sys.executable, jobs.write(tmp_path, KERNEL), *words]
    with jobs.start(*command, env=os.environ | {"IPYTHONDIR": str(tmp_path)}) as kernel:
        found = []
        while len(found) < 2:
            line = kernel.stdout.readline()
            assert line, "the kernel has ended"
            if line.startswith("rank "):
                found.append(int(line.split()[3]))
        if words:
            time.sleep(1)
            kernel.kill()
        kernel.stdout.read()
        assert kernel.wait(60) == (-signal.SIGKILL if words else 0)
        wait_for_end(found)
