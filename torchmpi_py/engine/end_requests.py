"""SIGTERM as a request to end: all ranks end after the same step."""

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
MOST_STEPS = 64  # Steps may become slower, so this limits the number of steps between two exchanges.


class EndRequests:
    """Context manager in which SIGTERM requests the end of the program instead of killing it.

    SIGTERM keeps its usual effect if the program has its own handler, and in a block outside the main thread. After
    ``requested`` has returned True, SIGTERM has no effect until the process ends or enters another such block. So a
    second signal does not kill the program while it saves or cleans up.

    If a signal arrives, but the block ends before ``requested`` has returned True, the signal has its usual effect at
    the end of the block. This also happens if an error ends the block. The error is logged first, because the killed
    process does not raise it. If SystemExit (such as EndRequested) or KeyboardInterrupt ends the block, the exception
    propagates, and the signal is ignored.

    The class also works with one rank, and without ``mpi.start()``.

    Examples:
        >>> with mpi.engine.EndRequests() as end:
        ...     for step in range(3):
        ...         # train one step here
        ...         if end.requested():
        ...             # save here
        ...             raise mpi.errors.EndRequested  # exit code 143
    """

    # Ranks get the signal at different moments. Some ranks may not get it at all, because torchmpirun reaches only the
    # ranks of its own host. So the ranks exchange whether one of them got it. An exchange costs as much as a barrier,
    # so the ranks exchange about once per EXCHANGE_SECONDS: after as many steps as the slowest rank takes in this time.

    def __init__(self) -> None:
        self._has_come = False
        self._is_known = False  # whether ``requested`` has returned True
        self._steps_left = 1
        self._num_steps = 1  # steps from the last exchange to the next one
        self._size = 0  # Number of ranks at the last exchange. If a rank has died, the next call is an exchange.
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
                logger.error("SIGTERM arrived before this error, and ends the process now", exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    def requested(self, *, now: bool = False) -> bool:
        """Return whether any rank got SIGTERM, with the same result on every rank.

        Every rank must call this method once per step. At most about four calls per second communicate. The other calls
        return False immediately.

        Args:
            now (bool): True makes this call communicate; default False. Pass the same value on every rank.

        Returns:
            True if this call communicates and a rank of the current level got SIGTERM.
        """
        size = outcomes.size()
        self._steps_left -= 1
        if self._steps_left > 0 and size == self._size and not now:
            return False
        step_seconds = (time.monotonic() - self._when) / self._num_steps
        facts = torch.tensor([float(self._has_come), step_seconds], dtype=torch.float64, device="cpu")
        if size > 1:
            allreduce(facts, op="max")
        self._is_known = bool(facts[0])
        self._size, self._when = size, time.monotonic()
        num_fitting = int(EXCHANGE_SECONDS / max(float(facts[1]), 1e-6))
        self._num_steps = self._steps_left = max(1, min(num_fitting, 2 * self._num_steps, MOST_STEPS))
        return self._is_known

    def _on_signal(self, signum: int, frame: FrameType | None) -> Any:
        self._has_come = True


def _is_known_already(signum: int, frame: FrameType | None) -> None:
    """Ignore SIGTERM after the ranks have agreed to end. Child processes do not inherit this handler."""
