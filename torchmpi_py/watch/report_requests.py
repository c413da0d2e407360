"""Serve requests for a report: a user can send SIGUSR1 to a rank even while the rank's main thread hangs.

The idea: Python runs signal handlers in the main thread, which is the thread that hangs. The handler of
``faulthandler`` is written in C, so it runs immediately, and writes the stack of a thread to a file. Here the file is a
pipe, and a byte in the pipe means that the signal has arrived.

An alternative is to block SIGUSR1 in all threads, and to wait for the signal in a thread of this package. We do not do
so, because programs that the rank starts would inherit the blocked signal. They do not inherit the handler.

The handler and the pipe remain when the package stops, so that a later signal does no harm. The handler must not be
removed, because the program may have registered another handler with ``faulthandler`` since then, and the two handlers
cannot be distinguished.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time

from torchmpi_py.launch import proc

_SIGNAL = signal.SIGUSR1
_DUMP_SECONDS = 0.02  # time to wait for a stack, which the handler writes in many small pieces


class ReportRequests:
    """The requests to this process: a pipe that becomes readable when a request arrives."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._is_registered = False

    def listen(self) -> int:
        """Let SIGUSR1 write to the pipe, and return the descriptor from which the pipe can be read.

        If the program or its launcher already uses SIGUSR1, install no handler. ``wake`` still writes to the pipe.
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
            with contextlib.suppress(BlockingIOError):  # A full pipe also wakes the reader.
                os.write(self._pipe[1], b"\n")

    def acknowledge(self) -> None:
        """Empty the pipe, because one report answers all requests so far."""
        time.sleep(_DUMP_SECONDS)
        self._empty()

    def disown(self) -> None:
        """Restore the default action of SIGUSR1 in a forked child, and close the child's copy of the pipe."""
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
    # The system's masks of ignored signals and of caught signals also cover handlers that C code has installed.
    masks = [proc.field("self", "status", name) for name in ("SigIgn", "SigCgt")]
    return any(int(mask, 16) >> _SIGNAL - 1 & 1 for mask in masks)


requests = ReportRequests()
