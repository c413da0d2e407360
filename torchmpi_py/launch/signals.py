"""What comes to torchmpirun from outside: signals that end the job, and signals that are for its ranks.

Ctrl-C, SIGTERM and SIGHUP end it, and so does the death of its parent (a batch script's shell, an ssh session), which
counts as a SIGHUP. It survives that one where it was started to: SIGHUP ignored (nohup), SIGINT ignored (the background
of a script), or as the leader of a session (setsid). SIGINT or SIGTERM, once more, cuts the ranks' time short.

SIGUSR1 and SIGUSR2 are passed on: batch systems announce the end of an allocation with them, and a program that dies of
one, or fails soon after it, would find no time in another attempt. (A rank that has called ``mpi.start`` takes SIGUSR1
for a question, and lives.)

The handlers only note what came: the job, and who starts it again, look. They stay for as long as there is a folder or
a process to be cleaned away.
"""

import os
import signal
import subprocess
import time
from types import FrameType

from torchmpi_py.launch.terminal import say

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CUTTING_SHORT = (signal.SIGINT, signal.SIGTERM)  # when the job is being ended already
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_SOON_SECONDS = 30.0
_SAME_SECONDS = 1.0  # one request: timeout(1) signals the process and its group, systemd sends SIGTERM and SIGHUP
PARENT_ENDED = "its parent has ended, and so does the job (nohup or setsid lets it go on)"


class Signals:
    """Within ``with``, notes signals in place of dying of them."""

    def __init__(self) -> None:
        self.ending: list[int] = []  # those that end the job, in order
        self._to_pass_on: list[int] = []
        self._passed_on: dict[int, float] = {}  # when
        self._before: dict[int, object] = {}
        self._ended_at = 0.0  # the last of `ending`
        self._parent = 0  # 0: its death does not matter

    def __enter__(self) -> "Signals":
        is_to_survive = any(signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGHUP, signal.SIGINT))
        if not is_to_survive and os.getsid(0) != os.getpid():
            self._parent = os.getppid()
        for signum in (*_ENDING, *_PASSED_ON):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or the background of a script
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, former in self._before.items():
            signal.signal(signum, former)  # type: ignore[arg-type]

    def _note(self, signum: int, _: FrameType | None) -> None:
        if signum not in _ENDING:
            self._to_pass_on.append(signum)
            return
        now = time.monotonic()
        if not self.ending or (signum in _CUTTING_SHORT and now - self._ended_at > _SAME_SECONDS):
            self.ending.append(signum)
            self._ended_at = now

    def look_at_parent(self) -> None:
        """Take the parent's death for a SIGHUP, unless the job is being ended already."""
        if self._parent and os.getppid() != self._parent and not self.ending:
            self._note(signal.SIGHUP, None)
            say(PARENT_ENDED)

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
