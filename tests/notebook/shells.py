"""An IPython shell of this process with the extension, and interrupts for it."""

import os
import pathlib
import re
import signal
import textwrap
import threading
import time

import pytest
from support import jobs

pytest.importorskip("IPython", reason="pip install ipython")
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Notebook:
    """An IPython shell with the extension, and what its last cell gave."""

    def __init__(self):
        self.shell = InteractiveShell(colors="nocolor")
        self.shell.history_manager.enabled = False
        self.shell.display_pub = CapturingDisplayPublisher(parent=self.shell)
        self.shell.run_line_magic("load_ext", "torchmpi_py.notebook")

    @property
    def magics(self):
        return self.shell.magics_manager.registry["TorchMPIMagics"]

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


def wait_for_end(process_ids):
    jobs.until(lambda: not any(map(is_running, process_ids)))


def is_running(process_id):
    try:
        return pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def interrupt_when(condition):
    """Have Ctrl-C come to this process as soon as the condition is true, as from the button of a notebook."""

    def run():
        while not condition():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=run, daemon=True).start()


def both_are_in(folder):
    """Whether both ranks have written their file; the cell does so with ``touch``."""
    return lambda: all((folder / rank).exists() for rank in "01")


def touch(folder):
    return f"import pathlib; pathlib.Path({str(folder)!r}, str(mpi.rank())).touch()"
