"""The magics of a notebook: ``%%torchmpi`` runs a cell on all ranks, and ``%torchmpi`` shows or changes their state."""

from __future__ import annotations

import atexit
import pickle
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from torchmpi_py.errors import LaunchError
from torchmpi_py.notebook.cell_run import CellRun, RanksEnded
from torchmpi_py.notebook.rank_job import RankJob
from torchmpi_py.notebook.rank_output import name_ranks

_COMMANDS = "%torchmpi status, %torchmpi restart, %torchmpi stop, or %torchmpi pull NAME"


@magics_class
class TorchMPIMagics(Magics):
    """The magics ``%%torchmpi`` and ``%torchmpi``, and the ranks that they start."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._job: RankJob | None = None
        self._words: list[str] = []  # options of the last job
        self._ended = ""  # reason for the end of the last job
        atexit.register(self.stop)

    @line_cell_magic
    def torchmpi(self, line: str, cell: str | None = None) -> Any:
        """Run the cell on all ranks, or carry out one command.

        ``%%torchmpi -n 4`` starts ranks with these options of torchmpirun; later cells may omit the options. On every
        rank ``mpi`` is imported and started, and ``torch`` is imported. ``%torchmpi status`` shows the activity of each
        rank, ``%torchmpi restart`` starts new ranks, ``%torchmpi stop`` ends the ranks, and ``%torchmpi pull NAME``
        returns the value of a variable of rank 0.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"%torchmpi {line}: {error}; check the quotation marks and backslashes") from None
        if cell is None:
            return self._command(*words)
        job = self._ready(words)
        source = cell if cell.startswith("%%") else f"# %%torchmpi\n{cell}"  # A comment line keeps the line numbers.
        return self._run(job, job.ranks, "cell", len(self.shell.user_ns["In"]) - 1, source)

    def _command(self, command: str = "", *words: str) -> Any:
        if command == "pull" and len(words) == 1:
            return self._run(self._ready([]), {0}, "pull", words[0])
        if command == "status" and not words:
            self._tell_status()
        elif command in ("restart", "stop") and not words:
            self.stop()
            if command == "restart":
                self._start()
        else:
            raise UsageError(f"%torchmpi {' '.join((command, *words))}: use {_COMMANDS}; for a cell, use %%torchmpi")
        return None

    def _run(self, job: RankJob, ranks: set[int], kind: str, *content: object) -> Any:
        """Send a task to ranks, and show its output. For the task ``pull``, return the value of the variable."""
        run = CellRun(job, self.shell)
        try:
            run.carry_out(ranks, kind, *content)
        except RanksEnded as error:
            self._job, self._ended = None, str(error)
            raise
        return None if run.pulled is None else pickle.loads(run.pulled)

    def _ready(self, words: list[str]) -> RankJob:
        """Return the job that runs the next cell. Start a new job if there is none, or if the options have changed."""
        self._look()
        if self._job is not None and words and words != self._job.words:
            print(f"the options have changed to {shlex.join(words)}; new ranks start, and all variables are lost")
            self.stop()
        if self._job is not None and self._job.busy:
            raise UsageError(
                f"the last cell still runs on {name_ranks(self._job.busy)} of {self._job.size}; run %torchmpi status "
                "to see where, or %torchmpi restart to start new ranks"
            )
        return self._job or self._start(words)

    def _look(self, and_ask: bool = False) -> dict[int, tuple[str, str, object]]:
        """Handle the events since the last cell. With ``and_ask``, return the place of each rank that answers."""
        try:
            if self._job is not None:
                return CellRun(self._job, self.shell).drain(self._job.ranks if and_ask else None)
        except RanksEnded as error:
            self._job = None
            print(error)
        return {}

    def _start(self, words: list[str] | None = None) -> RankJob:
        self._words = words or self._words
        try:
            self._job = job = RankJob(self._words)
        except LaunchError as error:
            raise UsageError(str(error)) from None
        again, self._ended = "new " if self._ended else "", ""
        hosts = sorted({process.host for process in job.processes.values()})
        print(f"{job.size} {again}rank{'s' * (job.size != 1)} on {', '.join(hosts)}")
        return job

    def stop(self) -> None:
        """End the ranks, if there are any."""
        job, self._job = self._job, None
        if job is not None:
            job.stop()

    def _tell_status(self) -> None:
        places = self._look(and_ask=True)
        if self._job is None:
            print("there are no ranks; to start four, begin a cell with %%torchmpi -n 4")
            return
        for rank, process in sorted(self._job.processes.items()):
            call, line, _ = places.get(rank, ("", "does not answer", None))
            state = f"{line}, in {call}" if call else line or "idle"
            print(f"rank {rank}: process {process.process_id} on {process.host}, {state}")
