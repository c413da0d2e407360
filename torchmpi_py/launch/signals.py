"""What comes to torchmpirun from outside: signals that end the job, and signals that are for its ranks.

Ctrl-C, SIGTERM and SIGHUP end it. SIGUSR1 and SIGUSR2 are passed on: batch systems announce the end of an allocation
with them, and a program that dies of one, or fails soon after it, would find no time in another attempt. (A rank that
has called ``mpi.start`` takes SIGUSR1 for a question, and lives.)

The handlers only note what came: the job, and who starts it again, look. They stay for as long as there is a folder or
a process to be cleaned away.
"""

import signal
import subprocess
import time
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_SOON_SECONDS = 30.0


class Signals:
    """Within ``with``, notes signals in place of dying of them."""

    def __init__(self) -> None:
        self.ending: list[int] = []  # those that end the job, in order
        self._to_pass_on: list[int] = []
        self._passed_on: dict[int, float] = {}  # when
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Signals":
        for signum in (*_ENDING, *_PASSED_ON):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or the background of a script
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, former in self._before.items():
            signal.signal(signum, former)  # type: ignore[arg-type]

    def _note(self, signum: int, _: FrameType | None) -> None:
        (self.ending if signum in _ENDING else self._to_pass_on).append(signum)

    def pass_on(self, process: "subprocess.Popen[bytes]") -> None:
        """Send a starter what came for the ranks."""
        while self._to_pass_on:
            signum = self._to_pass_on.pop(0)
            process.send_signal(signum)
            self._passed_on[signum] = time.monotonic()

    def cause(self, code: int) -> int:
        """The signal passed on of which a job died that has just ended with this code, or soon after; else 0."""
        for signum, when in self._passed_on.items():
            if code in (signum, 128 + signum) or time.monotonic() - when < _SOON_SECONDS:
                return signum
        return 0
