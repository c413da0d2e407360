"""The thread in which a rank carries out what it asks of parameter servers, in the order in which it asks.

Another one than that of asynchronous collectives, which wait for other ranks: a parameter server waits for none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torchmpi_py.communication_thread import CommunicationThread
from torchmpi_py.handles import Handle

R = TypeVar("R")
_thread: CommunicationThread | None = None  # from the first request until all servers are freed


def submit(label: str, step: Callable[[], R]) -> Handle[R]:
    """Queue a step; what it returns, or raises, comes out of the handle."""
    global _thread
    if _thread is None:
        _thread = CommunicationThread(inline=False, name="parameter-server")
    return _thread.submit(_Request(label, step))


def drain() -> None:
    """Wait until all that was queued is done, and end the thread."""
    global _thread
    if _thread is not None:
        _thread.close()
        _thread = None


class _Request(Generic[R]):
    """A step as work for the thread."""

    def __init__(self, label: str, step: Callable[[], R]) -> None:
        self.label = label
        self.run_in_background = self.finish = step

    def explain(self, error: Exception) -> Exception:
        return error
