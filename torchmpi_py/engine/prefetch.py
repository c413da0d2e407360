"""Items computed ahead of the loop that uses them, by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


def prefetched(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The same items, up to ``depth`` of them computed ahead by a daemon thread; 0: no thread.

    Closing the generator ends the thread: at once, or when the item under construction is done. An exception from
    ``items`` is raised here, in its place in the sequence, with its own traceback.
    """
    if depth == 0:
        yield from items
        return
    ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
    stopped = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, ready, stopped), name="torchmpi_py prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Raised):
                raise item.error
            yield item
    finally:
        stopped.set()
        # The thread puts at most one thing after it could have seen the event: an emptied queue has room for that.
        while not ready.empty():
            ready.get_nowait()
        thread.join()


class _Raised(NamedTuple):
    error: BaseException


_END = object()


def _fill(items: Iterable[Any], ready: queue.Queue[Any], stopped: threading.Event) -> None:
    try:
        for item in items:
            ready.put(item)
            if stopped.is_set():
                return
        ready.put(_END)
    except BaseException as error:  # raised again in the loop that asked for the items
        ready.put(_Raised(error))
