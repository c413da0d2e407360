"""Cells on ranks, in an IPython shell of this process.

The tests share a job of two ranks, in this order: those that leave it as it is, one that has to be followed by other
ranks, those that end ranks.
"""

import os
import queue
import signal
import sys
import threading
import time

import pytest
from shells import Notebook, both_are_in, interrupt_when, touch, wait_for_end
from support import jobs

from torchmpi_py.errors import Unavailable
from torchmpi_py.notebook import cell_run, rank_job

pytestmark = [pytest.mark.timeout(200), jobs.needs_mpi]


def test_variables_live_from_cell_to_cell_and_values_are_shown(notebook):
    notebook.good("x = torch.arange(3.0) + mpi.rank()\nmpi.allreduce(x)")
    assert notebook.good("x") == "[0-1] tensor([1., 3., 5.])\n"
    assert notebook.good("x;") == ""
    assert notebook.good("print('rank', mpi.rank())") == "rank 0\n[1] rank 1\n"


def test_what_ipython_has(notebook):
    assert "[0-1] Signature: mpi.rank() -> 'int'\n" in notebook.good("mpi.rank?")
    assert notebook.good("!echo $((1 + 2))").split() == ["[0-1]", "3"]
    assert "loop" in notebook.good("%%timeit -n 1 -r 1\npass")
    assert notebook.good("import asyncio\nawait asyncio.sleep(0)\n_ = 5\n_ + 1") == "[0-1] 6\n"
    assert "SyntaxError" in notebook.fails("1 +")


def test_errors_on_all_ranks_are_one(notebook):
    output = notebook.fails("def half(x):\n    return x / 0\nhalf(1)")
    assert output.count("ZeroDivisionError: division by zero") == 1
    number = len(notebook.shell.user_ns["In"]) - 1
    assert f"Cell In[{number}], line 3, in half" in output  # the magic's line counts
    assert "ranks 0-1 of 2 failed" in output
    assert "collectives" not in output
    assert notebook.good("mpi.allreduce(1)") == "[0-1] 2\n"


def test_figures_and_values_in_a_better_form_are_rank_0s(notebook):
    pytest.importorskip("matplotlib")
    notebook.good("from matplotlib import pyplot\npyplot.plot([mpi.rank(), 1]);")
    (figure,) = notebook.shell.display_pub.outputs
    assert figure["data"]["image/png"]
    notebook.good("class Table:\n    def _repr_html_(self): return f'<b>{mpi.rank()}</b>'\nTable()")
    (table,) = notebook.shell.display_pub.outputs
    assert table["data"]["text/html"] == "<b>0</b>"


def test_pull(notebook):
    notebook.good("import numpy\nfound = {'loss': torch.full((2,), 3.0 + mpi.rank())}\ndef f(): pass")
    notebook.run("taken = %torchmpi pull found")
    assert notebook.shell.user_ns["taken"]["loss"].tolist() == [3.0, 3.0]
    assert "name 'nothing' is not defined on rank 0" in notebook.run("%torchmpi pull nothing")[0]


def test_output_of_threads_children_and_c(notebook):
    output, errors = notebook.cell(
        """
        import os, sys, threading
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()
        print("a warning", file=sys.stderr)
        os.system("echo from a child")
        if (child := os.fork()) == 0:
            print("from a fork")
            os._exit(0)
        os.waitpid(child, 0)[1]
        """
    )
    assert notebook.result.success
    assert "[0-1] from a thread\n" in output
    assert "[0-1] a warning\n" in errors
    until = time.monotonic() + 60  # what children and C write comes by way of the launcher
    while any(errors.count(text) < 2 for text in ("child", "fork")) and time.monotonic() < until:
        errors += notebook.cell("pass")[1]
    assert errors.count("from a child") == errors.count("from a fork") == 2


def test_a_cell_that_heeds_the_interrupt_has_not_failed(notebook, tmp_path):
    interrupt_when(both_are_in(tmp_path))
    output = notebook.good(
        f"""
        import time
        try:
            {touch(tmp_path)}
            time.sleep(1000)
        except KeyboardInterrupt:
            print("heeded")
        """
    )
    assert "heeded" in output


def test_an_interrupt_while_the_cell_is_sent(notebook, tmp_path, monkeypatch):
    send, first = rank_job.Connection.send, notebook.magics._job._connections[0]

    def late(self, message):
        """Rank 1 gets the cell when rank 0 has begun it, and the interrupt has come."""
        while message[0] == "cell" and self is not first and not (tmp_path / "0").exists():
            time.sleep(0.01)
        time.sleep(0.4 if message[0] == "cell" and self is not first else 0.0)
        send(self, message)

    monkeypatch.setattr(rank_job.Connection, "send", late)
    interrupt_when((tmp_path / "0").exists)
    assert (
        notebook.fails(f"import time\n{touch(tmp_path)}\ntime.sleep(1000)").rstrip().endswith("ranks 0-1 of 2 failed")
    )
    assert notebook.good("mpi.allreduce(1)") == "[0-1] 2\n"


def test_a_collective_of_some_ranks_alone_is_named_and_can_be_interrupted(notebook, monkeypatch):
    """Other options start other ranks after that, without variables."""
    monkeypatch.setattr(cell_run, "LOOK_SECONDS", 0.2)
    said, write = threading.Event(), cell_run.CellRun._write

    def note(run, stream, text):
        write(run, stream, text)
        if "the cell waits in allreduce" in text:
            said.set()

    monkeypatch.setattr(cell_run.CellRun, "_write", note)
    interrupt_when(said.is_set)
    output, errors = notebook.cell("kept = 1\nif mpi.rank() > 0:\n    mpi.allreduce(torch.ones(3))")
    assert not notebook.result.success
    assert "KeyboardInterrupt" in output
    assert errors.count("the cell waits in allreduce (Cell In[") == 1
    assert "on rank 1, but not on rank 0; interrupt the cell" in errors
    assert notebook.good("mpi.size()", "-n 1").endswith("1\n")
    assert "NameError" in notebook.fails("kept")


def test_loading_the_extension_again_ends_the_ranks(loaded):
    if loaded.magics._job is None:
        loaded.good("pass", "-n 1")
    before = loaded.processes()
    loaded.run("%reload_ext torchmpi_py.notebook")
    wait_for_end(before.values())
    assert loaded.run("%torchmpi status")[0].startswith("there are no ranks")


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_the_next_cell_starts_anew(notebook, monkeypatch, tmp_path):
    """An error of another rank is shown as well."""
    on_error, heard = cell_run.CellRun._on_error, tmp_path / "heard"

    def hear(*arguments):
        on_error(*arguments)
        heard.touch()

    monkeypatch.setattr(cell_run.CellRun, "_on_error", hear)
    before = notebook.processes()
    output = notebook.fails(
        f"""
        import os, time
        kept = 1
        if mpi.rank() == 0:
            raise ValueError("of rank 0")
        while not os.path.exists({str(heard)!r}):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
        """
    )
    assert "ValueError: of rank 0" in output
    assert f"rank 1 (process {before[1]}) was killed by signal 9" in output
    wait_for_end(before.values())
    output = notebook.fails("kept")
    assert "2 new ranks" in output
    assert "NameError" in output


@pytest.mark.slow
def test_deaths_between_cells(notebook):
    """The next cell tells it, and has new ranks; also if an interrupt came in the middle of the last words."""
    before = notebook.processes()
    os.kill(before[1], signal.SIGKILL)
    wait_for_end(before.values())
    output = notebook.good("mpi.size()", "-n 1")
    assert f"rank 1 (process {before[1]}) was killed by signal 9" in output
    assert output.endswith("1\n")
    job = notebook.magics._job
    os.kill(notebook.processes()[0], signal.SIGKILL)
    job.last_words()
    job.busy |= job.ranks
    assert "The ranks have ended" in notebook.run("%torchmpi status")[0]


class JobWithALateRank:
    """Rank 1 fails, and has called a collective less, just before it is asked where it is."""

    size, ranks, busy, has_ended = 2, {0, 1}, {1}, False

    def __init__(self):
        self.events, self.num_called, self.sent = queue.SimpleQueue(), {0: {"world": 4}}, []

    def send(self, ranks, kind):
        self.sent.append(kind)
        if kind == "where":
            self.events.put((1, ("error", "ValueError", "boom", [])))
            self.events.put((1, ("done", {"world": 3})))
            for rank in ranks:
                self.events.put((rank, ("where", ("", "line 3", None))))


def test_a_rank_that_fails_while_it_is_asked_where_it_is_is_shown(capsys):
    job = JobWithALateRank()
    assert cell_run.CellRun(job, None).drain({0, 1}) == dict.fromkeys((0, 1), ("", "line 3", None))
    said = capsys.readouterr().err
    assert "rank 1: ValueError: boom" in said
    assert "different numbers of collectives" in said
    assert job.sent == ["where", "refuse"]


def test_a_mistake_is_an_error_with_a_remedy():
    notebook = Notebook()
    for line, remedy in (
        ("%torchmpi", "%torchmpi status"),
        ("%torchmpi pull", "pull NAME"),
        ("%%torchmpi -n none\n1", "-n 4"),
        ("%%torchmpi -n '2\n1", "No closing quotation"),
        ("%%torchmpi train.py\n1", "the cell is the program"),
        ("%%torchmpi -n 2 --elastic --layouts --discover x\n1", "omit --elastic, --discover, --layouts, which"),
        ("%%torchmpi -n 2 --hosts a.invalid:2\n1", "a.invalid"),
        ("%%torchmpi -n 2 --env wrong\n1", "write NAME=VALUE"),
    ):
        said = "".join(notebook.run(line))
        assert "UsageError" in said
        assert remedy in said
        assert notebook.magics._job is None


def test_without_ipython_the_remedy_is_named(monkeypatch):
    for module in ("IPython", "IPython.core.error"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torchmpi_py.notebook.magics", raising=False)
    from torchmpi_py import notebook

    with pytest.raises(Unavailable, match="run: pip install ipython"):
        notebook.load_ipython_extension(None)
