"""The thread in which a rank carries out what it asks of parameter servers, in the order in which it asks.

Another one than that of asynchronous collectives, which wait for other ranks: a parameter server waits for none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from torchmpi_py.core import communicators, journal
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.handles import Handle, Work

R = TypeVar("R")
_lock = threading.Lock()
_thread: CommunicationThread | None = None  # from the first request until all servers are freed


def submit(label: str, step: Callable[[], R]) -> Handle[R]:
    """Queue a step; what it returns, or raises, comes out of the handle."""
    return _queue(_Request(label, step))


def submit_unnoted(step: Callable[[], R]) -> Handle[R]:
    """Queue a step of something that was noted as a whole: many of them would push all else out of the records."""
    return _queue(_Step("look at a parameter server", step))


def _queue(work: _Step[R]) -> Handle[R]:
    global _thread
    with _lock:
        if _thread is None:
            _thread = CommunicationThread(inline=False, name="parameter-server")
        return _thread.submit(work)


def drain() -> None:
    """Wait until all that was queued is done, and end the thread."""
    global _thread
    with _lock:
        if _thread is not None:
            _thread.close()
            _thread = None


class _Step(Work[R]):
    """A step as work for the thread."""

    def __init__(self, label: str, step: Callable[[], R]) -> None:
        self._label = label
        self._step: Callable[[], R] | None = step

    @property
    def label(self) -> str:
        return self._label

    def run(self, in_background: bool = False) -> R:
        """Out of sight of autograd, and of what mode the caller's tensors were made in."""
        assert self._step is not None
        with torch.inference_mode():
            return self._step()

    def release(self) -> None:
        self._step = None


class _Request(_Step[R]):
    """One that is noted."""

    def __init__(self, label: str, step: Callable[[], R]) -> None:
        super().__init__(label, step)
        self.entry: journal.Entry = journal.record_own(label, communicators.stack().levels[0])

    def run(self, in_background: bool = False) -> R:
        journal.begin(self.entry)
        try:
            result = super().run(in_background)
        except BaseException:
            journal.fail(self.entry)
            raise
        journal.end_launched(self.entry)
        return result
