"""Signals that torchmpirun receives, and their effect on the ranks of this host.

Ctrl-C, SIGTERM and SIGHUP end the job. The death of torchmpirun's parent (a batch script's shell, an ssh session)
counts as a SIGHUP. There are three exceptions: SIGHUP is ignored (nohup), SIGINT is ignored (a background job of a
script), or torchmpirun leads a session (setsid). A second SIGINT or SIGTERM cuts the ranks' time short.

SIGUSR1 and SIGUSR2 are forwarded to mpirun, or with ``--groups`` to the mpirun of every group. Batch systems use these
signals to announce the end of an allocation. If a program dies of such a signal, or fails soon after it, the job is not
restarted, because another attempt would have too little time. (A rank that has called ``mpi.start`` survives SIGUSR1
and prints a report.)

A signal that requests the end of the job is sent by torchmpirun directly to the ranks, because mpirun would kill the
ranks instead of forwarding the signal. Only ranks with a handler for the signal get it. A rank without a handler for
SIGTERM has nothing to save, and its death would make the MPI kill the other ranks too early. Every Python program has a
handler for Ctrl-C, which raises KeyboardInterrupt. SIGHUP is forwarded as SIGTERM, because programs save at SIGTERM.
Ranks on other hosts get no signal. In training with checkpoints, the ranks pass the request on to the other hosts
(`engine.EndRequests`). Any other program on another host is ended with the job.

A rank that ends by KeyboardInterrupt or ``sys.exit`` after such a request waits until torchmpirun kills it (`wrap`), so
that the other ranks can use their whole grace period. But other ranks may be waiting for that rank inside the MPI
library, where Python runs no handlers, and they would never end. Marks show which ranks Ctrl-C has reached. If the
program has installed its own handler, there is no mark. Then a rank counts as waiting if it neither ends nor writes
anything for some seconds.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from types import FrameType

from torchmpi_py.launch import cleanup, exit_marks, proc
from torchmpi_py.launch.terminal import say

# Signals within this time count as one request, because timeout(1) sends its signal both to the process and to its
# group, and systemd sends both SIGTERM and SIGHUP.
SAME_SECONDS = 1.0
SOON_SECONDS = 30.0  # A failure within this time after a forwarded signal counts as an effect of the signal.
PARENT_ENDED = "the parent process has ended, so the job ends too; to prevent this, use nohup or setsid"

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CUTTING_SHORT = (signal.SIGINT, signal.SIGTERM)  # signals that have an effect while the job is already ending
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.05
_DEADLOCK_SECONDS = 3.0  # Limit for Ctrl-C to reach the first rank.
_DEAF_SECONDS = 0.5  # Limit for a signal to reach a program that computes, after another rank has ended its program.
_IDLE_SECONDS = 10.0  # After another rank has ended its program, ranks that write nothing for this time are waiting.


class Signals:
    """Recorder of signals, for the loops that run and restart a job.

    Within the ``with`` block, signals are only recorded and do not end this process.
    """

    def __init__(self) -> None:
        self.ending: list[int] = []  # signals that end the job, in order
        self._to_pass_on: list[int] = []
        self._passed_on: dict[int, float] = {}  # maps a signal to the time at which it was forwarded
        self._before: dict[int, object] = {}
        self._ended_at = 0.0  # time of the last signal in `ending`
        self._parent = 0  # process ID of the parent; 0 if the death of the parent does not end the job

    def __enter__(self) -> "Signals":
        is_to_survive = any(signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGHUP, signal.SIGINT))
        if not is_to_survive and os.getsid(0) != os.getpid():
            self._parent = os.getppid()
        for signum in (*_ENDING, *_PASSED_ON):
            # If a signal is already ignored, such as under nohup or in a script's background job, keep it ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self.receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, former in self._before.items():
            signal.signal(signum, former)  # type: ignore[arg-type]

    def receive(self, signum: int, _: FrameType | None = None) -> None:
        """Record a signal. Of several signals within a second that end the job, record only the first."""
        if signum not in _ENDING:
            self._to_pass_on.append(signum)
            return
        now = time.monotonic()
        if not self.ending or (signum in _CUTTING_SHORT and now - self._ended_at > SAME_SECONDS):
            self.ending.append(signum)
            self._ended_at = now

    def look_at_parent(self) -> None:
        """Treat the death of this process's parent as a SIGHUP, unless the job is already ending."""
        if self._parent and os.getppid() != self._parent and not self.ending:
            self.receive(signal.SIGHUP)
            say(PARENT_ENDED)

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until ``seconds`` have passed, ``is_over()`` is true, or a signal ends the job."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (self.ending or is_over()):
            time.sleep(_POLL_SECONDS)
            self.look_at_parent()

    def pass_on(self, *processes: "subprocess.Popen[bytes]") -> None:
        """Forward recorded SIGUSR1 and SIGUSR2 to these mpirun processes; without processes, drop the signals."""
        while self._to_pass_on:
            signum = self._to_pass_on.pop(0)
            for process in processes:
                process.send_signal(signum)
                self._passed_on[signum] = time.monotonic()

    def cause(self, code: int) -> int:
        """Return the forwarded signal that caused a failure; 0 if there is none.

        ``code`` is the exit code of a job that has just ended. Any failure soon after a forwarded signal counts as an
        effect of the signal.
        """
        for signum, when in self._passed_on.items():
            if code in (signum, 128 + signum) or time.monotonic() - when < SOON_SECONDS:
                return signum
        return 0


class ForwardedSignal:
    """A signal that is sent to the ranks of this host to request their end.

    ``ranks`` maps each rank that gets the signal to its process ID. ``reason`` is a message about ranks that are killed
    before the end of their grace period, or "".
    """

    def __init__(self, remains: cleanup.Remains, signum: int) -> None:
        self._remains = remains
        self._signum = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        self.reason = ""
        # In an elastic job, the mark of a dead rank remains. Another process may have its process ID now.
        running = {rank: pid for rank, pid in exit_marks.ranks_running(remains.folder).items() if self._lives(pid)}
        self.ranks = {rank: pid for rank, pid in running.items() if _heeds(pid, self._signum)}
        self._others = [pid for rank, pid in running.items() if rank not in self.ranks]
        self._sent = self._changed = time.monotonic()
        self._written: dict[int, int] = {}

    def send(self) -> None:
        """Send the signal to the ranks, after writing the mark ``ending``."""
        exit_marks.leave(self._remains.folder, "ending")
        for process_id in self.ranks.values():
            if self._lives(process_id):
                cleanup.send_signal(process_id, self._signum)
        self._sent = time.monotonic()

    def unfinished(self) -> set[int]:
        """Return the ranks that got the signal, are alive, and have not ended their program."""
        ranks_gone = {failure.rank for failure in exit_marks.failures(self._remains.folder)}
        here = exit_marks.ranks_running(self._remains.folder)
        return {rank for rank in self.ranks.keys() - ranks_gone if rank in here and self._lives(here[rank])}

    def is_over(self) -> bool:
        """Return whether torchmpirun must kill the remaining ranks, because their programs have ended or never will."""
        failures = exit_marks.failures(self._remains.folder)
        at_work = self.unfinished()
        # If all ranks with the signal have ended their programs, mpirun ends too, unless a rank waits to be killed or
        # did not get the signal.
        if not at_work:
            return bool(failures) or any(self._lives(process_id) for process_id in self._others)
        has_heard = {rank for rank in self.ranks if exit_marks.is_left(self._remains.folder, f"heard-{rank}")}
        # If Ctrl-C has reached every remaining rank, these ranks run Python code, for example in ``finally``. Do not
        # end the job yet.
        if at_work <= has_heard:
            return False
        # Some ranks may be waiting in MPI for a rank that has ended its program, or for each other.
        times = [failure.when for failure in failures if failure.rank in has_heard]
        if self._is_idle(at_work):
            ranks = ", ".join(map(str, sorted(at_work)))
            since = f"for {_IDLE_SECONDS:g} s after another rank ended"
            self.reason = f"killed rank{'s' * (',' in ranks)} {ranks}: no output {since} (probably waiting in MPI)"
        elif not has_heard and self._is_deadlock():
            self.reason = "killed all ranks: no rank reacted to Ctrl-C (probably waiting in MPI)"
        return bool(self.reason) or (bool(times) and time.time() - min(times) > _DEAF_SECONDS)

    def _is_idle(self, at_work: set[int]) -> bool:
        """Return whether a rank has ended its program, and no other rank has ended or written for `_IDLE_SECONDS`."""
        written = {rank: num_written(self.ranks[rank]) for rank in at_work}
        if written != self._written:
            self._written, self._changed = written, time.monotonic()
        # If the ranks have agreed to end, no rank waits for another one, so do not cut their time short.
        has_agreed = exit_marks.code_of_end(self._remains.folder) != 0
        return len(at_work) < len(self.ranks) and not has_agreed and time.monotonic() - self._changed > _IDLE_SECONDS

    def _is_deadlock(self) -> bool:
        """Return whether Ctrl-C has reached no rank in time, probably because all ranks wait in C code."""
        if self._signum != signal.SIGINT or time.monotonic() - self._sent < _DEADLOCK_SECONDS:
            return False
        return not any(exit_marks.is_left(self._remains.folder, f"own-{rank}") for rank in self.ranks)

    def _lives(self, process_id: int) -> bool:
        return self._remains.has(process_id)


def _heeds(process_id: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal."""
    return bool(int(proc.field(process_id, "status", "SigCgt"), 16) >> signum - 1 & 1)


def num_written(process_id: int) -> int:
    """Return the number of bytes that the process has written to files and pipes; 0 if it is unknown."""
    return int(proc.field(process_id, "io", "wchar"))
