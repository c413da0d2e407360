"""Kinds of device, as far as the order of work on them goes: streams and events.

A *stream* is a queue of work that a GPU carries out in order; an *event* marks a point in one, for which another
stream, or the host, can wait. Memory of the host has them too, in name: there, work is done when a call returns. So
what is written for GPUs also runs on the host, where its logic is tested.

Asynchronous operations on GPU tensors.

The communication thread carries them out, with a stream of its own as the current one: that stream first waits for what
the launching thread's current stream held at the launch, so that the operation sees the tensors as the caller left
them. ``wait`` makes the waiting thread's current stream wait for the operation, and returns when its work has been
queued, not when the GPU has done it; ``synchronize`` and ``done`` are about the GPU.

Tensors on a GPU, as a parameter server exchanges them: by way of pinned memory of the host.

The client's thread copies, on a stream of its own, once the stream of the caller has come to where the call was made. A
handle that is complete has been copied to the end: no stream needs to wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import communication_thread
from torchmpi_py.core.handles import Handle, ThreadHandle, Work

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


class HostDevice:
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
    return Cuda(device) if device.type == "cuda" else HostDevice(device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


R = TypeVar("R")


class StreamHandle(ThreadHandle[R]):
    """An operation in the communication thread whose work goes to a ``stream`` of ``device``.

    The stream first waits for all that the current stream holds now, so the operation sees ``tensors`` as they are.
    """

    def __init__(self, work: Work[R], device: Device, stream: Stream, tensors: Iterable[object]) -> None:
        super().__init__(work)
        self._device, self._stream = device, stream
        self._finished, self._ready = device.event(), device.event()
        self._ready.record(device.current())
        _use_on(stream, tensors)

    def _run(self) -> R:
        with self._device.on(self._stream):
            self._stream.wait_event(self._ready)
            try:
                return super()._run()
            finally:
                self._finished.record(self._stream)

    def done(self) -> bool:
        """Whether the GPU has carried out the operation, or the operation has failed; never blocks."""
        return super().done() and self._finished.query()

    def wait(self, timeout_seconds: float | None = None) -> R:
        """Make this thread's current stream wait for the operation, and return its result.

        The host waits only until the work has been queued, at most ``timeout_seconds``. Errors as for CPU tensors.
        """
        result = super().wait(timeout_seconds)
        stream = self._device.current()
        stream.wait_event(self._finished)
        _use_on(stream, [result])
        return result

    def synchronize(self) -> None:
        """Block the host until the GPU has carried out the operation."""
        super().wait()
        self._finished.synchronize()


def submit(
    work: Work[R],
    device: torch.device | None,
    tensors: Iterable[object],
    thread: communication_thread.CommunicationThread | None = None,
) -> Handle[R]:
    """Queue an operation for the communication ``thread`` (default: the process's own).

    For ``tensors`` on a GPU (``device``) the operation goes to a stream of that thread.
    """
    thread = thread or communication_thread.current()
    if device is None:
        return thread.submit(work)
    used = of(device)
    if used not in thread.streams:
        thread.streams[used] = used.stream()
    return thread.enqueue(StreamHandle(work, used, thread.streams[used], tensors), work.entry)


def _use_on(stream: Any, tensors: Iterable[object]) -> None:
    """Keep CUDA's allocator from giving their memory to others before the stream is through with it."""
    for x in tensors:
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(stream)


class HostCopy:
    """The copy on the host of a flat tensor on another device. Made in the caller's thread, used in the client's."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._device = of(x.device)
        self._ready = self._device.event()
        self._ready.record(self._device.current())

    def taken(self) -> Tensor:
        """The values of the tensor, on the host."""
        host = self.empty()
        self._in_order(lambda: host.copy_(self._x, non_blocking=True))
        return host

    def empty(self) -> Tensor:
        """Memory on the host for its values."""
        return torch.empty(self._x.shape, dtype=self._x.dtype, device="cpu", pin_memory=self._x.is_cuda)

    def give(self, host: Tensor, then: Callable[[], object] | None) -> None:
        """Bring values from the host into the tensor, and do what is to be done with it there."""

        def copy() -> None:
            self._x.copy_(host, non_blocking=True)
            if then is not None:
                then()

        self._in_order(copy)

    def _in_order(self, copy: Callable[[], object]) -> None:
        stream = self._device.stream()
        with self._device.on(stream):
            stream.wait_event(self._ready)
            copy()
            stream.synchronize()
