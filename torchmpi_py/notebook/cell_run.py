"""The run of a cell on the ranks: its output in the notebook, and its end.

An error on one rank ends the cell only on this rank, and the other ranks continue. If all other busy ranks wait in
calls of the package without any progress, the kernel assumes that they wait for the failed rank, and interrupts them.
Alternative: interrupt the other ranks immediately. Why not: this would also stop ranks that do not depend on the failed
rank. After a failure the kernel compares how many collectives each rank has called. If the numbers differ, later calls
of different collectives would match, so all collectives raise an error from then on.
"""

from __future__ import annotations

import queue
import sys
import time
from typing import Any

from torchmpi_py.notebook.rank_job import LAUNCHER, RankJob
from torchmpi_py.notebook.rank_output import OutputMerger, name_ranks

LOOK_SECONDS = 2.0  # time between two checks for ranks that wait for a failed rank
INTERRUPT_SECONDS = 6.0  # time for the ranks to react to an interrupt
_EVENT_SECONDS = 0.05
_ANSWER_SECONDS = 1.0
_RESTART = "run %torchmpi restart to start new ranks"


class RanksFailed(Exception):  # noqa: N818 - IPython shows the name to the user
    """A cell failed on some ranks. IPython shows ``lines``, the traceback of one rank, and then ``summary``."""

    def __init__(self, summary: str, lines: list[str] | None = None) -> None:
        super().__init__(summary)
        self._lines = [*(lines or []), summary]

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows, instead of the kernel's own frames."""
        return self._lines


class RanksEnded(RanksFailed):
    """The job of the ranks has ended."""


class CellRun:
    """The run of one cell, or of another task, on the ranks of ``job``. ``shell`` is the kernel's shell."""

    def __init__(self, job: RankJob, shell: Any) -> None:
        self._job, self._shell = job, shell
        self._merger = OutputMerger(job.size, self._write)
        self._errors: dict[int, tuple[str, str, list[str]]] = {}  # errors by rank, in the order of arrival
        self._places: dict[int, tuple[str, str, object]] = {}
        self._interrupted = ""  # reason for the interrupt
        self._has_warned = False
        self._freed: set[int] = set()  # ranks that were interrupted because they waited for a failed rank
        self._interrupted_at = self._flushed = 0.0
        self._looked = time.monotonic()
        self.pulled: bytes | None = None

    def carry_out(self, ranks: set[int], kind: str, *content: object) -> None:
        """Send a task to ranks, and show their output until no rank is busy.

        Raise RanksFailed if the task fails or is interrupted, or RanksEnded if the job ends.
        """
        was_sent = False
        while self._job.busy or not was_sent:
            try:
                if not was_sent:
                    was_sent = True
                    self._job.begin(ranks, kind, *content)
                self._take()
                if self._interrupted and time.monotonic() - self._interrupted_at > INTERRUPT_SECONDS:
                    break
                if self._job.busy and (self._errors or self._job.busy != self._job.ranks) and not self._interrupted:
                    self._look_for_waiting()
            except KeyboardInterrupt:
                if self._interrupted:
                    break
                self._interrupt("interrupted")
        self._conclude()

    def drain(self, asked: set[int] | None = None) -> dict[int, tuple[str, str, object]]:
        """Show the output since the last cell, including the output of ranks that had not completed the cell.

        Return the result of ``ask_where(asked)``. Raise RanksEnded if the job has ended.
        """
        had_not_ended = bool(self._job.busy)
        while not self._job.events.empty():
            self._take()
        places = {} if self._job.has_ended else self.ask_where(asked or set())
        self._merger.flush(is_end=True)
        if had_not_ended:
            late = [f"rank {rank}: {name}: {text}" for rank, (name, text, _) in self._errors.items()]
            if not self._job.busy and self._is_out_of_step():
                late.append(self._refuse())
            self._write("stderr", "".join(f"{line}\n" for line in late))
        if self._job.has_ended:
            self._on_gone(LAUNCHER)
        return places

    def ask_where(self, ranks: set[int]) -> dict[int, tuple[str, str, object]]:
        """Return (call, line, progress) of each of these ranks that answers within a second.

        ``call`` is the package's call in which the rank waits, ``line`` is the line of the cell, and ``progress`` is
        the number of operations that the rank has called.
        """
        self._places.clear()
        self._job.send(ranks, "where")
        until = time.monotonic() + _ANSWER_SECONDS
        while ranks - self._places.keys() and time.monotonic() < until:
            self._take()
        return dict(self._places)

    def _take(self) -> None:
        """Handle the next event, if there is one, and write the lines that are due."""
        try:
            rank, (kind, *content) = self._job.events.get(timeout=_EVENT_SECONDS)
        except queue.Empty:
            pass
        else:
            getattr(self, f"_on_{kind}")(rank, *content)
        if self._job.events.empty() or time.monotonic() - self._flushed > _EVENT_SECONDS:
            # Do not flush after each event, because other lines may arrive between equal lines of several ranks.
            self._merger.flush()
            self._flushed = time.monotonic()

    def _write(self, stream: str, text: str) -> None:
        """Write to the current ``sys.stdout`` or ``sys.stderr``, which a notebook's kernel replaces."""
        print(text, end="", file=getattr(sys, stream))

    def _on_text(self, rank: int, stream: str, text: str) -> None:
        self._merger.add(rank, stream, text)

    def _on_line(self, _: int, text: str) -> None:
        self._write("stderr", text)

    def _on_shown(self, rank: int, data: dict[str, Any], metadata: dict[str, Any], options: dict[str, Any]) -> None:
        """Show a value of a rank. A value that also has other formats than plain text is shown only for rank 0."""
        if data.keys() == {"text/plain"}:
            self._merger.add_block(rank, "stdout", f"{data['text/plain']}\n")
        elif rank == 0:
            self._merger.flush(is_end=True)
            self._shell.display_pub.publish(data, metadata, **options)

    def _on_cleared(self, rank: int, wait: bool) -> None:
        if rank == 0:
            self._shell.display_pub.clear_output(wait)

    def _on_error(self, rank: int, *error: Any) -> None:
        self._errors.setdefault(rank, error)

    def _on_where(self, rank: int, place: tuple[str, str, object]) -> None:
        self._places[rank] = place

    def _on_pulled(self, _: int, value: bytes) -> None:
        self.pulled = value

    def _on_done(self, rank: int, num_called: dict[object, int]) -> None:
        self._job.busy.discard(rank)
        self._job.num_called[rank] = num_called

    def _on_over(self, _: int) -> None:
        self._on_gone(LAUNCHER)

    def _on_gone(self, _: int) -> None:
        """Show the last output, and raise RanksEnded. The end of one rank or of the launcher ends the whole job."""
        last_output = self._job.last_words(self._on_last)
        self._merger.flush(is_end=True)
        *lines, reason = last_output.splitlines()
        self._write("stderr", "".join(f"{line}\n" for line in lines))
        self._job.stop()
        reason = reason.removeprefix("torchmpirun: ")
        raise RanksEnded(
            f"The ranks have ended: {reason}\nTheir variables are lost. The next %%torchmpi starts new ranks.",
            self._traceback(self._errors),
        )

    def _on_last(self, rank: int, kind: str, *content: Any) -> None:
        """Handle an event that a rank sent before the job ended."""
        if kind in ("text", "shown", "error"):
            getattr(self, f"_on_{kind}")(rank, *content)

    def _look_for_waiting(self) -> None:
        """Interrupt the busy ranks if they wait for a failed rank.

        The busy ranks wait if two checks find each of them in the same call without progress. If no rank has failed,
        the idle ranks have completed the cell or do not run it. In that case show one warning and let the busy ranks
        wait, because a thread of an idle rank may still make the missing call.
        """
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        before, self._looked = self._places.copy(), time.monotonic()
        now = self.ask_where(set(self._job.busy))
        if now and now == before and now.keys() == self._job.busy and all(call for call, _, _ in now.values()):
            if self._errors:
                self._freed = set(self._job.busy)
                self._interrupt("waited for a rank that failed")
            elif not self._has_warned:
                self._has_warned = True
                calls = ", ".join(sorted({f"{call} ({line})" for call, line, _ in now.values()}))
                idle = name_ranks(self._job.ranks - self._job.busy)
                text = f"the cell waits in {calls} on {name_ranks(now)}, but not on {idle}"
                self._write("stderr", f"{text}; interrupt the cell, and make the same calls on all ranks\n")

    def _interrupt(self, how: str) -> None:
        self._interrupted, self._interrupted_at = how, time.monotonic()
        self._job.send(set(self._job.busy), "interrupt")

    def _conclude(self) -> None:
        """Raise an error that describes the failures and interrupts of the cell, if there were any."""
        self._merger.flush(is_end=True)
        if self._job.busy and self._job.has_ended:  # The user has interrupted _on_gone.
            self._on_gone(LAUNCHER)
        if not (self._errors or self._interrupted):
            return
        waits = {f"{call} ({line})" for rank, (call, line, _) in self._places.items() if rank in self._freed}
        waited_in = ", ".join(sorted(waits))
        # Request the places before counting the errors, because ranks may fail or end the cell before they answer.
        places = self.ask_where(set(self._job.busy)) if self._job.busy else {}
        self._merger.flush(is_end=True)
        failed = {rank: error for rank, error in self._errors.items() if rank not in self._freed}
        texts = []
        if failed:
            texts.append(f"{name_ranks(failed)} of {self._job.size} failed")
        if self._freed:
            texts.append(f"{name_ranks(self._freed)} waited in {waited_in}, and had to be interrupted")
        if self._job.busy:  # The interrupt had no effect.
            where = {f"{call} ({line})" for rank, (call, line, _) in places.items() if line and rank in self._job.busy}
            at = f": {', '.join(sorted(where))}" if where else ""
            texts.append(f"{name_ranks(self._job.busy)} cannot be interrupted{at}; {_RESTART}")
        elif self._is_out_of_step():
            texts.append(self._refuse())
        if not (texts or self._errors):  # The cell caught the interrupt and continued.
            return
        raise RanksFailed("\n".join(texts), self._traceback(failed or self._errors))

    def _traceback(self, errors: dict[int, tuple[str, str, list[str]]]) -> list[str]:
        """Return the traceback of the rank that failed first, and one line for each other error."""
        ranks_by_error: dict[tuple[str, str], list[int]] = {}
        for rank, (name, text, _) in errors.items():
            ranks_by_error.setdefault((name, text), []).append(rank)
        if not ranks_by_error:
            return []
        (_, ranks), *others = ranks_by_error.items()
        return [*errors[ranks[0]][2], "", *(f"{name_ranks(theirs)}: {': '.join(error)}" for error, theirs in others)]

    def _refuse(self) -> str:
        """Make all later collectives raise an error, and return the message for the user."""
        self._job.send(self._job.ranks, "refuse")
        return f"the ranks have called different numbers of collectives, so all collectives now fail; {_RESTART}"

    def _is_out_of_step(self) -> bool:
        """Return whether, on any communicator, the ranks have called different numbers of operations."""
        counts: dict[object, set[int]] = {}
        for num_called in self._job.num_called.values():
            for communicator, number in num_called.items():
                counts.setdefault(communicator, set()).add(number)
        return any(len(numbers) > 1 for numbers in counts.values())
