"""Serve requests for a report: a user sends SIGUSR1 to a rank, whatever its main thread is doing.

The idea: Python runs signal handlers in the main thread, which is the thread that hangs. The handler of
``faulthandler`` is written in C, so it runs at once, and writes the stack of a thread to a file. Here the file is a
pipe: a byte in the pipe means that the signal has arrived.

An alternative is to block SIGUSR1 in all threads, and to wait for it in a thread of ours. We do not, because programs
that the rank starts would inherit the blocked signal; they do not inherit the handler.

Handler and pipe remain when the package is stopped, so that a later signal does no harm. The handler must not be
removed: the program may since have registered a handler with ``faulthandler`` too, and the two look the same.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time

from torchmpi_py.launch import proc

_SIGNAL = signal.SIGUSR1
_DUMP_SECONDS = 0.02  # the handler writes a stack in many small pieces; wait for all of them


class ReportRequests:
    """The requests to this process: a pipe that becomes readable when a request arrives."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._is_registered = False

    def listen(self) -> int:
        """Have SIGUSR1 write to the pipe; return the end to read from.

        If the program or its launcher already uses SIGUSR1, leave the signal alone; ``wake`` still writes to the pipe.
        """
        if self._pipe is None:
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._empty()
        if not _is_in_use():
            faulthandler.register(_SIGNAL, file=self._pipe[1], all_threads=False)
            self._is_registered = True
        return self._pipe[0]

    def wake(self) -> None:
        """Wake the reader of the pipe without a request."""
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
                os.write(self._pipe[1], b"\n")

    def acknowledge(self) -> None:
        """Empty the pipe, because one report serves all requests up to now."""
        time.sleep(_DUMP_SECONDS)
        self._empty()

    def disown(self) -> None:
        """Restore the default meaning of SIGUSR1 in a forked child, and close the parent's pipe."""
        if self._is_registered and signal.getsignal(_SIGNAL) in (signal.SIG_DFL, None):
            faulthandler.unregister(_SIGNAL)
        for end in self._pipe or ():
            os.close(end)
        self._pipe, self._is_registered = None, False

    def _empty(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._pipe[0], 1 << 16):
                    pass


def _is_in_use() -> bool:
    """Return whether SIGUSR1 is ignored, or handled by Python or C code."""
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return True
    # The system's masks show also the handlers that C code has installed: ignored signals and caught ones.
    masks = [proc.field("self", "status", name) for name in ("SigIgn", "SigCgt")]
    return any(int(mask, 16) >> _SIGNAL - 1 & 1 for mask in masks)


requests = ReportRequests()
