"""SIGUSR1 asks a rank for a report, whatever its main thread is doing.

Python runs its handlers in the main thread, which is the one that hangs. ``faulthandler`` has one of its own, in C,
that runs at once and writes where the thread stands to a file: here to a pipe, and who reads the pipe knows that the
signal came. Programs that the rank starts do not inherit it, as they would a blocked signal.

Handler and pipe stay when the package is stopped: a signal that comes then does no harm, and where the program has
registered a handler of its own meanwhile, with ``faulthandler`` too, which nobody can see, that one stays.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pathlib
import re
import signal
import time

_PIECES_SECONDS = 0.02  # the handler writes in many small pieces
_number = getattr(signal, "SIGUSR1", None)
_is_ours = False
_pipe: tuple[int, int] | None = None


def listen() -> int:
    """From now on SIGUSR1 writes to a pipe, whose end to read from is returned; ``wake`` writes to it too.

    Not the signal where the program, or its launcher, has other use for it.
    """
    global _is_ours, _pipe
    if _pipe is None:
        _pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _empty()
    if _number is not None and not _is_taken(_number):
        faulthandler.register(_number, file=_pipe[1], all_threads=False)
        _is_ours = True
    return _pipe[0]


def wake() -> None:
    """Wake who reads the pipe."""
    if _pipe is not None:
        with contextlib.suppress(BlockingIOError):
            os.write(_pipe[1], b"\n")


def catch_requests() -> None:
    """What has come was noticed."""
    time.sleep(_PIECES_SECONDS)
    _empty()


def disown() -> None:
    """In a forked child: it has the signal's usual meaning, and writes to its parent's pipe no longer."""
    global _is_ours, _pipe
    if _is_ours and _number is not None and signal.getsignal(_number) in (signal.SIG_DFL, None):
        faulthandler.unregister(_number)
    for file in _pipe or ():
        os.close(file)
    _is_ours, _pipe = False, None


def _empty() -> None:
    if _pipe is not None:
        with contextlib.suppress(BlockingIOError):
            while os.read(_pipe[0], 1 << 16):
                pass


def _is_taken(number: int) -> bool:
    """Whether somebody has asked for the signal, from Python or not, or wants it ignored."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return True
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return False
    masks = re.findall(r"^Sig(?:Ign|Cgt):\s*([0-9a-f]+)", status, re.MULTILINE)
    return any(int(mask, 16) >> number - 1 & 1 for mask in masks)
