"""SIGUSR1 asks a rank for a report, whatever its main thread is doing.

Python runs its handlers in the main thread, which is the one that hangs. ``faulthandler`` has one of its own, in C,
that runs at once and writes where the thread stands to a file: here to a pipe, and who reads the pipe knows that the
signal came. Programs that the rank starts do not inherit it, as they would a blocked signal.
"""

from __future__ import annotations

import faulthandler
import pathlib
import re
import signal

_number = getattr(signal, "SIGUSR1", None)
_is_ours = False


def listen(file: int) -> None:
    """From now on SIGUSR1 writes to this pipe, which does not block.

    Not where the program, or its launcher, has other use for the signal.
    """
    global _is_ours
    if _number is None or _is_taken(_number):
        return
    faulthandler.register(_number, file=file, all_threads=False)
    _is_ours = True


def ignore() -> None:
    """It does so no longer. Where the program has a handler of its own meanwhile, that one stays."""
    global _is_ours
    if _is_ours and _number is not None and signal.getsignal(_number) in (signal.SIG_DFL, None):
        faulthandler.unregister(_number)
    _is_ours = False


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
