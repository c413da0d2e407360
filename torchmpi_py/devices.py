"""Kinds of device, as far as the order of work on them goes: streams and events.

A *stream* is a queue of work that a GPU carries out in order; an *event* marks a point in one, for which another
stream, or the host, can wait. Memory of the host has them too, in name: there, work is done when a call returns. So
what is written for GPUs also runs on the host, where its logic is tested.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger("torchmpi_py")


class Event(Protocol):
    """A point in a stream; one that was never recorded is past."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """A queue of work on a device."""

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Device(Protocol):
    """What flavours need of a device."""

    def __hash__(self) -> int: ...

    device: torch.device

    def current(self) -> Stream:
        """The stream that this thread's work goes to."""

    def stream(self) -> Stream:
        """A new stream, whose work goes before that of ordinary ones where both could run."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Let this thread's work go to ``stream``."""

    def event(self) -> Event:
        """A new event."""

    def pin(self, x: Tensor) -> None:
        """Let the device copy to and from the host memory of ``x`` by itself. Undone by ``unpin``."""

    def unpin(self, x: Tensor) -> None:
        """Before the memory is given back."""

    def synchronize(self) -> None:
        """Wait, on the host, for all work of this process."""

    def is_capturing(self) -> bool:
        """Whether work of this thread is being recorded into a graph, instead of carried out."""


class _Done:
    """Stream and event of a device whose work is done when a call returns."""

    def wait_event(self, event: object) -> None:
        """It has been."""

    def record(self, stream: object) -> None:
        """It is past."""

    def synchronize(self) -> None:
        """It is."""

    def query(self) -> bool:
        return True


_DONE = _Done()


class Host:
    """The memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> _Done:
        return _DONE

    def stream(self) -> _Done:
        return _DONE

    def on(self, stream: object) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def event(self) -> _Done:
        return _DONE

    def pin(self, x: Tensor) -> None:
        """The host needs no help."""

    def unpin(self, x: Tensor) -> None:
        """Nothing was done."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def is_capturing(self) -> bool:
        return False


class Cuda:
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned: set[int] = set()

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """The device first, or a thread that is on another one would take memory there when it goes back to it."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pin(self, x: Tensor) -> None:
        """Without leave to (a limit on locked memory, say) copies are slower, and block the host: said once."""
        code = int(_runtime().cudaHostRegister(x.data_ptr(), x.nbytes, 0))
        if code == 0:
            self._pinned.add(x.data_ptr())
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)  # takes the error from CUDA, that the next kernel is not blamed for it
        if not _warned:
            _warned.append(code)
            logger.warning("CUDA cannot pin %d bytes of shared memory (error %d): staging is slower", x.nbytes, code)

    def unpin(self, x: Tensor) -> None:
        if x.data_ptr() in self._pinned:
            self._pinned.remove(x.data_ptr())
            _runtime().cudaHostUnregister(x.data_ptr())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


_warned: list[int] = []


@functools.cache
def of(device: torch.device) -> Device:
    """The kind of a tensor's device."""
    return Cuda(device) if device.type == "cuda" else Host(device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
