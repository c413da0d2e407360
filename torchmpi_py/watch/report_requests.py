"""Requests for a report: a user sends SIGUSR1 to a rank, whatever its main thread is doing.

Python runs signal handlers in the main thread, which is the thread that hangs. ``faulthandler`` has a handler in C
instead, which runs at once and writes the stack of a thread to a file: here to a pipe, so that a byte in the pipe means
that the signal came. Programs that the rank starts do not inherit the handler, as they would a blocked signal.

Handler and pipe stay when the package is stopped: a signal that comes later does no harm. A handler that the program
has registered since then, with ``faulthandler`` too, cannot be distinguished from this one, and must not be removed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time

from torchmpi_py.launch import proc

_SIGNAL = signal.SIGUSR1
_DUMP_SECONDS = 0.02  # the handler writes a stack in many small pieces


class ReportRequests:
    """The requests to this process: a pipe that becomes readable when one comes."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._is_registered = False

    def listen(self) -> int:
        """Have SIGUSR1 write to the pipe; return the end to read from.

        A program or a launcher that has another use for SIGUSR1 keeps the signal; ``wake`` still writes to the pipe.
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
        """Empty the pipe: the requests up to now are served by one report."""
        time.sleep(_DUMP_SECONDS)
        self._empty()

    def disown(self) -> None:
        """In a forked child: give SIGUSR1 its usual meaning, and close the parent's pipe."""
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
    """Whether SIGUSR1 is handled, by Python or by C code, or ignored."""
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return True
    # The masks of ignored and of caught signals.
    masks = [proc.field("self", "status", name) for name in ("SigIgn", "SigCgt")]
    return any(int(mask, 16) >> _SIGNAL - 1 & 1 for mask in masks)


requests = ReportRequests()
