"""SIGTERM as a request to end, which all ranks heed after the same step."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from torchmpi_py.collectives.verbs import allreduce
from torchmpi_py.engine import outcomes

logger = logging.getLogger("torchmpi_py")

EXCHANGE_SECONDS = 0.25
MOST_STEPS = 64  # from one exchange to the next: steps may become slower meanwhile


class EndRequests:
    """In ``with EndRequests() as end``, SIGTERM asks the program to end, in place of ending it at once.

    ::

        with EndRequests() as end:
            for step in range(first, last):
                ...
                if end.requested():
                    checkpoints.save(step + 1, {"model": model.state_dict()})
                    raise EndRequested  # from torchmpi_py.errors; the exit code is 143

    The signal is left alone where the program has a handler for it, and outside the main thread. A signal that no call
    of ``requested`` has reported when the block ends has its usual effect then: also where an error ends the block,
    which is logged before, for a process that the signal ends does not raise it. A block that SystemExit (EndRequested,
    say) or KeyboardInterrupt ends is left as they say. After ``requested`` has returned True the signal has no effect
    until the process ends, or enters such a block again: a signal that is sent twice does not end the program while it
    saves or cleans up. Works in a world of one, and without ``mpi.start()``.
    """

    # Ranks get the signal at different moments, and some may not get it at all (torchmpirun reaches those of its own
    # host), so the ranks exchange whether one of them has. An exchange costs as much as a barrier. So they exchange
    # after as many steps as take EXCHANGE_SECONDS on the rank that needs longest for them.

    def __init__(self) -> None:
        self._has_come = False
        self._is_known = False  # ``requested`` has returned True
        self._steps_left = 1
        self._num_steps = 1  # from the last exchange to the next one
        self._size = 0  # ranks at the last exchange: survivors of a death begin with the same count
        self._when = time.monotonic()

    def __enter__(self) -> EndRequests:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _is_known_already):
            signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if signal.getsignal(signal.SIGTERM) != self._on_signal:
            return
        signal.signal(signal.SIGTERM, _is_known_already if self._is_known else signal.SIG_DFL)
        if self._has_come and not self._is_known and (error is None or isinstance(error, Exception)):
            if error is not None:
                logger.error("SIGTERM came before this error, and has its usual effect now", exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    def requested(self, *, now: bool = False) -> bool:
        """Whether a rank was asked to end: True on all ranks, or on none. ``now``: exchange it in this call.

        Every rank of the current level calls it once a step. Some of the calls, four a second at most if steps are not
        very short, exchange what the ranks know; the others return False at once.
        """
        size = outcomes.size()
        self._steps_left -= 1
        if self._steps_left > 0 and size == self._size and not now:
            return False
        step_seconds = (time.monotonic() - self._when) / self._num_steps
        known = torch.tensor([float(self._has_come), step_seconds], dtype=torch.float64, device="cpu")
        if size > 1:
            allreduce(known, op="max")
        self._is_known = bool(known[0])
        self._size, self._when = size, time.monotonic()
        fitting = int(EXCHANGE_SECONDS / max(float(known[1]), 1e-6))
        self._num_steps = self._steps_left = max(1, min(fitting, 2 * self._num_steps, MOST_STEPS))
        return self._is_known

    def _on_signal(self, signum: int, frame: FrameType | None) -> Any:
        self._has_come = True


def _is_known_already(signum: int, frame: FrameType | None) -> None:
    """SIGTERM's handler when the ranks have agreed to end; programs that this one starts do not inherit it."""
