"""Cells on ranks, in an IPython shell of this process."""

import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from torchmpi_py.errors import Unavailable
from torchmpi_py.notebook import cell_run, rank_job, rank_output

pytest.importorskip("IPython", reason="pip install ipython")
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

pytestmark = pytest.mark.timeout(200)
COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Notebook:
    """An IPython shell with the extension, and what its last cell gave."""

    def __init__(self):
        self.shell = InteractiveShell(colors="nocolor")
        self.shell.history_manager.enabled = False
        self.shell.display_pub = CapturingDisplayPublisher(parent=self.shell)
        self.shell.run_line_magic("load_ext", "torchmpi_py.notebook")
        self.magics = self.shell.magics_manager.registry["TorchMPIMagics"]

    def run(self, source):
        """Run a cell; (output, errors) as text."""
        self.shell.display_pub.outputs.clear()
        with capture_output(display=False) as captured:
            self.result = self.shell.run_cell(textwrap.dedent(source), store_history=True)
        return COLOUR.sub("", captured.stdout), COLOUR.sub("", captured.stderr)

    def cell(self, source, options=""):
        return self.run(f"%%torchmpi {options}\n{textwrap.dedent(source)}")

    def fails(self, source, options=""):
        """What is shown of a cell that fails."""
        output, _ = self.cell(source, options)
        assert not self.result.success
        return output

    def good(self, source, options=""):
        output, errors = self.cell(source, options)
        assert self.result.success, output + errors
        return output

    def processes(self):
        return {rank: process.process_id for rank, process in self.magics._job.processes.items()}


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Equal lines are one, and ranks say where they are, however late they are on this machine."""
    monkeypatch.setattr(rank_output, "HOLD_SECONDS", 60.0)
    monkeypatch.setattr(cell_run, "_ANSWER_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _interruptible():
    """Ctrl-C reaches this process also where the tests were started in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def loaded(num_ranks):
    notebook = Notebook()
    yield notebook
    notebook.magics.stop()


@pytest.fixture(scope="module")
def num_ranks():
    return 3


@pytest.fixture
def notebook(loaded, num_ranks):
    """A notebook with idle ranks, those of the test before if they are as many."""
    output = loaded.good("pass", f"-n {num_ranks}")
    assert "Error" not in output
    return loaded


def wait_for_end(process_ids):
    until = time.monotonic() + 60
    while alive := [each for each in process_ids if os.path.exists(f"/proc/{each}/exe") and is_running(each)]:
        assert time.monotonic() < until, alive
        time.sleep(0.1)


def is_running(process_id):
    try:
        return pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def interrupt_when(*files):
    """Have Ctrl-C come to this process once these files are there, as from the button of a notebook."""

    def run():
        while not all(file.exists() for file in files):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=run, daemon=True).start()


def test_variables_live_from_cell_to_cell_and_values_are_shown(notebook, num_ranks):
    notebook.good("x = torch.arange(3.0) + mpi.rank()\nmpi.allreduce(x)")
    total = num_ranks * (num_ranks - 1) / 2
    expected = f"tensor([{total:g}., {total + num_ranks:g}., {total + 2 * num_ranks:g}.])"
    assert notebook.good("x") == f"[0-{num_ranks - 1}] {expected}\n"
    assert notebook.good("x;") == ""
    lines = notebook.good("print('rank', mpi.rank())").splitlines()
    assert lines == ["rank 0", *(f"[{rank}] rank {rank}" for rank in range(1, num_ranks))]


def test_what_ipython_has(notebook, num_ranks):
    everyone = f"[0-{num_ranks - 1}]"
    assert f"{everyone} Signature: mpi.rank() -> 'int'\n" in notebook.good("mpi.rank?")
    assert notebook.good("!echo $((1 + 2))").split() == [everyone, "3"]
    assert "loop" in notebook.good("%%timeit -n 1 -r 1\npass")
    assert notebook.good("import asyncio\nawait asyncio.sleep(0)\n_ = 5\n_ + 1") == f"{everyone} 6\n"
    assert "SyntaxError" in notebook.fails("1 +")


def test_errors_on_all_ranks_are_one(notebook, num_ranks):
    output = notebook.fails("def half(x):\n    return x / 0\nhalf(1)")
    assert output.count("ZeroDivisionError: division by zero") == 1
    number = len(notebook.shell.user_ns["In"]) - 1
    assert f"Cell In[{number}], line 3, in half" in output  # the magic's line counts
    assert f"ranks 0-{num_ranks - 1} of {num_ranks} failed" in output
    assert "collectives" not in output
    assert notebook.good("mpi.allreduce(1)") == f"[0-{num_ranks - 1}] {num_ranks}\n"


@pytest.mark.slow
def test_who_waits_for_a_rank_that_failed_is_freed(notebook, num_ranks):
    output = notebook.fails(
        """
        if mpi.rank() == 1:
            raise ValueError("no data")
        mpi.allreduce(torch.ones(3))
        """
    )
    others = "rank 0" if num_ranks == 2 else "ranks 0,2"
    assert "ValueError: no data" in output
    assert f"rank 1 of {num_ranks} failed\n{others} waited in allreduce (Cell In[" in output
    assert "different numbers of collectives" in output
    assert "CommunicatorError" in notebook.fails("mpi.allreduce(torch.ones(3))")
    assert notebook.good("2 + 2") == f"[0-{num_ranks - 1}] 4\n"
    notebook.run("%torchmpi restart")
    assert "NameError" in notebook.fails("x")
    assert notebook.good("mpi.allreduce(1)") == f"[0-{num_ranks - 1}] {num_ranks}\n"


def test_a_collective_of_some_ranks_alone_is_named_and_can_be_interrupted(notebook, num_ranks, monkeypatch):
    said = threading.Event()
    write = cell_run.CellRun._write

    def note(run, stream, text):
        write(run, stream, text)
        if "still in allreduce" in text:
            said.set()

    def interrupt():
        said.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cell_run.CellRun, "_write", note)
    (thread := threading.Thread(target=interrupt)).start()
    output, errors = notebook.cell("if mpi.rank() > 0:\n    mpi.allreduce(torch.ones(3))")
    thread.join()
    others = "rank 1" if num_ranks == 2 else "ranks 1-2"
    assert not notebook.result.success
    assert "KeyboardInterrupt" in output
    assert errors.count(f"{others} still in allreduce (Cell In[") == 1
    assert "rank 0 is not in it" in errors
    notebook.run("%torchmpi restart")


@pytest.mark.slow
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
def test_an_interrupt_reaches_all_ranks(notebook, num_ranks, tmp_path, work, is_in_step):
    """Also in a collective, which counts from the moment in which the last rank has called it."""
    interrupt_when(*(tmp_path / str(rank) for rank in range(num_ranks)))
    output = notebook.fails(
        f"""
        import pathlib, threading, time
        from torchmpi_py.core import journal, status_board

        def report():
            while not ({is_in_step} or mpi.rank() == 0 or journal.under_way(status_board.current)):
                time.sleep(0.01)
            pathlib.Path({str(tmp_path)!r}, str(mpi.rank())).touch()

        threading.Thread(target=report, daemon=True).start()
        {work}
        """
    )
    assert "KeyboardInterrupt" in output
    assert "rank_program.py" not in output
    assert "cannot be interrupted" not in output
    assert f"ranks 0-{num_ranks - 1} of {num_ranks} failed" in output
    assert ("different numbers of collectives" in output) != is_in_step
    assert notebook.good("mpi.rank()").startswith("0\n[1] 1\n")
    if not is_in_step:
        notebook.run("%torchmpi restart")


def test_an_interrupt_while_the_cell_is_sent(notebook, num_ranks, tmp_path, monkeypatch):
    send, first, begun = rank_job.Connection.send, notebook.magics._job._connections[0], tmp_path / "begun"

    def late(self, message):
        """Ranks get the cell when rank 0 has begun it, and the interrupt has come."""
        while message[0] == "cell" and self is not first and not begun.exists():
            time.sleep(0.01)
        time.sleep(1.0 if message[0] == "cell" and self is not first else 0.0)
        send(self, message)

    monkeypatch.setattr(rank_job.Connection, "send", late)
    interrupt_when(begun)
    output = notebook.fails(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(1000)")
    assert output.rstrip().endswith(f"ranks 0-{num_ranks - 1} of {num_ranks} failed")
    assert notebook.good("mpi.allreduce(1)") == f"[0-{num_ranks - 1}] {num_ranks}\n"


def test_a_cell_that_heeds_the_interrupt_has_not_failed(notebook, num_ranks, tmp_path):
    interrupt_when(*(tmp_path / str(rank) for rank in range(num_ranks)))
    output = notebook.good(
        f"""
        import pathlib, time
        try:
            pathlib.Path({str(tmp_path)!r}, str(mpi.rank())).touch()
            time.sleep(1000)
        except KeyboardInterrupt:
            print("heeded")
        """
    )
    assert "heeded" in output


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


@pytest.mark.slow
def test_ranks_that_heed_an_interrupt_late_are_compared(notebook, num_ranks, tmp_path, monkeypatch):
    """The cell has ended without them; where they have called other numbers of collectives, nothing may meet them."""
    monkeypatch.setattr(cell_run, "INTERRUPT_SECONDS", 0.5)
    interrupt_when(*(tmp_path / str(rank) for rank in range(num_ranks)))
    output = notebook.fails(
        f"""
        import pathlib, time
        from torchmpi_py.core import journal
        if mpi.rank() == 0:
            journal.end(journal.record_plain("alone", mpi.communicator(0)))
        pathlib.Path({str(tmp_path)!r}, str(mpi.rank())).touch()
        try:
            time.sleep(1000)
        finally:
            time.sleep(5 - mpi.rank())
        """
    )
    assert "cannot be interrupted" in output
    errors, until = "", time.monotonic() + 100
    while notebook.magics._job.busy and time.monotonic() < until:
        errors += notebook.run("%torchmpi status")[1]  # of the ranks that have ended meanwhile
        time.sleep(0.1)
    assert f"rank {num_ranks - 1}: KeyboardInterrupt" in errors
    assert "different numbers of collectives" in errors
    assert "CommunicatorError" in notebook.fails("mpi.allreduce(torch.ones(3))")
    notebook.run("%torchmpi restart")


@pytest.mark.slow
def test_a_rank_that_cannot_be_interrupted_is_named(notebook, num_ranks, tmp_path):
    interrupt_when(tmp_path / "waiting")
    output = notebook.fails(
        f"""
        import pathlib, threading, time
        from torchmpi_py.core import journal, status_board

        def report():
            while not journal.under_way(status_board.current):
                time.sleep(0.01)
            pathlib.Path({str(tmp_path)!r}, "waiting").touch()

        if mpi.rank() == 0:
            threading.Thread(target=report, daemon=True).start()
            mpi.split(0)
        """
    )
    assert "rank 0 cannot be interrupted: split (Cell In[" in output
    output, _ = notebook.run("%torchmpi status")
    assert "in split" in output.splitlines()[0]
    assert output.splitlines()[1].endswith("idle")
    output = notebook.cell("1")[0]
    assert "rank 0" in output + str(notebook.result.error_in_exec)
    assert not notebook.result.success
    notebook.run("%torchmpi restart")
    assert notebook.good("mpi.size()") == f"[0-{num_ranks - 1}] {num_ranks}\n"


def test_a_killed_rank_ends_the_job_and_the_next_cell_starts_anew(notebook, num_ranks):
    notebook.good("kept = 1")
    before = notebook.processes()
    output = notebook.fails("import os\nif mpi.rank() == 1: os.kill(os.getpid(), 9)\nmpi.barrier()")
    assert f"rank 1 (process {before[1]}) was killed by signal 9" in output
    wait_for_end(before.values())
    output = notebook.fails("kept")
    assert f"{num_ranks} new ranks" in output
    assert "NameError" in output


def test_a_death_between_cells(notebook, num_ranks):
    before = notebook.processes()
    os.kill(before[1], signal.SIGKILL)
    wait_for_end(before.values())
    output = notebook.good("mpi.size()")
    assert f"rank 1 (process {before[1]}) was killed by signal 9" in output
    assert output.endswith(f"[0-{num_ranks - 1}] {num_ranks}\n")


def test_an_error_of_a_rank_is_shown_also_where_another_one_dies(notebook, monkeypatch, tmp_path):
    on_error, heard = cell_run.CellRun._on_error, tmp_path / "heard"

    def hear(*arguments):
        on_error(*arguments)
        heard.touch()

    monkeypatch.setattr(cell_run.CellRun, "_on_error", hear)
    output = notebook.fails(
        f"""
        import os, time
        if mpi.rank() == 0:
            raise ValueError("of rank 0")
        while not os.path.exists({str(heard)!r}):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
        """
    )
    assert "ValueError: of rank 0" in output
    assert "was killed by signal 9" in output


def test_an_interrupt_at_the_end_of_a_job_leaves_no_dead_job(notebook, num_ranks):
    """Its last words have been taken, and the kernel still counts its ranks as busy."""
    job, before = notebook.magics._job, notebook.processes()
    os.kill(before[1], signal.SIGKILL)
    job.last_words()
    job.busy |= job.ranks
    assert "The ranks have ended" in notebook.run("%torchmpi status")[0]
    assert notebook.good("mpi.size()").endswith(f"[0-{num_ranks - 1}] {num_ranks}\n")


def test_other_options_start_other_ranks(notebook, num_ranks):
    notebook.good("kept = 1")
    assert notebook.good("mpi.size()", "-n 1").endswith("1\n")
    assert "NameError" in notebook.fails("kept")


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
    output, _ = notebook.run("%torchmpi pull nothing")
    assert "name 'nothing' is not defined on rank 0" in output


def test_output_of_threads_children_and_c(notebook, num_ranks):
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
    assert f"[0-{num_ranks - 1}] from a thread\n" in output
    assert f"[0-{num_ranks - 1}] a warning\n" in errors
    assert notebook.result.success
    until = time.monotonic() + 60  # what children and C write comes by way of the launcher
    while any(errors.count(text) < num_ranks for text in ("child", "fork")) and time.monotonic() < until:
        errors += notebook.cell("pass")[1]
    assert errors.count("from a child") == errors.count("from a fork") == num_ranks


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("%torchmpi", "%torchmpi status"),
        ("%torchmpi pull", "pull NAME"),
        ("%%torchmpi -n none\n1", "-n 4"),
        ("%%torchmpi -n '2\n1", "No closing quotation"),
        ("%%torchmpi train.py\n1", "the program is the cell"),
        ("%%torchmpi -n 2 --elastic\n1", "not for notebooks"),
        ("%%torchmpi -n 2 --hosts a.invalid:2\n1", "a.invalid"),
        ("%%torchmpi -n 2 --env wrong\n1", "write NAME=VALUE"),
    ],
)
def test_a_mistake_is_an_error_with_a_remedy(line, remedy):
    notebook = Notebook()
    output, errors = notebook.run(line)
    assert "UsageError" in errors + output
    assert remedy in errors + output
    assert notebook.magics._job is None


def test_loading_the_extension_again_ends_the_ranks():
    notebook = Notebook()
    notebook.good("pass", "-n 1")
    before = notebook.processes()
    notebook.run("%reload_ext torchmpi_py.notebook")
    wait_for_end(before.values())
    assert notebook.run("%torchmpi status")[0].startswith("no ranks")


@pytest.mark.slow
def test_the_end_of_the_kernel_ends_the_ranks(tmp_path):
    """In order, with an idle job; and by signal 9, while a cell runs."""
    program = tmp_path / "kernel.py"
    program.write_text(
        "import sys\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell()\nshell.run_line_magic('load_ext', 'torchmpi_py.notebook')\n"
        "shell.run_cell('%%torchmpi -n 2\\npass')\n"
        "shell.run_cell('%torchmpi status')\n"
        "if sys.argv[1:]: shell.run_cell('%%torchmpi\\nwhile True: pass')\n"
    )
    environment = os.environ | {"IPYTHONDIR": str(tmp_path)}
    for words in ([], ["busy"]):
        command = [sys.executable, str(program), *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as kernel:
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


def test_without_ipython_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setitem(sys.modules, "IPython.core.error", None)
    monkeypatch.delitem(sys.modules, "torchmpi_py.notebook.magics", raising=False)
    from torchmpi_py import notebook

    with pytest.raises(Unavailable, match="run: pip install ipython"):
        notebook.load_ipython_extension(None)
