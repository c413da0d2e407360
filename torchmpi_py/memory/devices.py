"""Devices: the order of work on them (streams and events), operations on a stream, and copies on the host.

A *stream* is a queue of work that a GPU carries out in order. An *event* is a point in a stream, for which another
stream or the host can wait. The streams and events of the host do nothing, because work on the host is complete when a
call returns. So the same code serves GPUs and the host, and tests on the host check its logic.

The communication thread carries out asynchronous operations on GPU tensors, with its own stream as the current stream.
This stream first waits for the work in the launching thread's current stream, so the operation gets the values that the
tensors have after this work. ``wait`` makes the waiting thread's current stream wait for the operation. ``wait``
returns when the operation's work has been queued. ``synchronize`` and ``done`` refer to the work on the GPU.

A parameter server exchanges GPU tensors through pinned host memory (``HostCopy``). The client's thread copies on its
own stream, after the work that was in the caller's stream at the call. When the handle is complete, the copy is also
complete, so no stream needs to wait for the copy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import communication_thread
from torchmpi_py.core.handles import Handle, ThreadHandle, Work

logger = logging.getLogger("torchmpi_py")
R = TypeVar("R")
_pin_failures: list[int] = []  # error code of the first failure in this process


class HostStream:
    """The host's stream and event, with the methods of torch.cuda.Stream and torch.cuda.Event.

    The methods do nothing, because work on the host is complete when a call returns. An event is always complete, like
    a CUDA event that was never recorded.
    """

    def wait_event(self, event: object) -> None:
        """Make work that is queued later wait for ``event``."""

    def record(self, stream: object) -> None:
        """Move this event to the current end of ``stream``."""

    def synchronize(self) -> None:
        """Block the host until the work is complete."""

    def query(self) -> bool:
        """Return whether the event is complete."""
        return True


_HOST_STREAM = HostStream()


class Device:
    """The operations of a device that flavours use. This class serves the host; ``Cuda`` derives from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Any:
        """Return the stream to which this thread's work goes."""
        return _HOST_STREAM

    def stream(self) -> Any:
        """Return a new stream of high priority."""
        return _HOST_STREAM

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Send this thread's work to ``stream`` within a ``with`` block."""
        return contextlib.nullcontext()

    def event(self) -> Any:
        """Return a new event."""
        return _HOST_STREAM

    def pin(self, x: Tensor) -> None:
        """Page-lock the host memory of ``x``, for copies to and from the device. ``unpin`` undoes this."""

    def unpin(self, x: Tensor) -> None:
        """Undo ``pin``. The caller must do this before the memory is freed."""

    def synchronize(self) -> None:
        """Block the host until all work of this process on the device is complete."""

    def is_capturing(self) -> bool:
        """Return whether this thread's work is recorded into a CUDA graph instead of carried out."""
        return False


class Cuda(Device):
    """The operations of a GPU that flavours use."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pinned: set[int] = set()

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        # Enter the device first. Otherwise torch would restore the stream of another device, and use memory there.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pin(self, x: Tensor) -> None:
        """Pin ``x``. If CUDA refuses, for example because of a limit on locked memory, log a warning once.

        Copies to and from memory that is not pinned block the host.
        """
        code = int(_runtime().cudaHostRegister(x.data_ptr(), x.nbytes, 0))
        if code == 0:
            self._pinned.add(x.data_ptr())
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)  # This raises CUDA's error, which otherwise the next kernel would raise.
        if not _pin_failures:
            _pin_failures.append(code)
            logger.warning("CUDA cannot pin %d bytes (error %d), so copies are slower; check ulimit -l", x.nbytes, code)

    def unpin(self, x: Tensor) -> None:
        if x.data_ptr() in self._pinned:
            self._pinned.remove(x.data_ptr())
            _runtime().cudaHostUnregister(x.data_ptr())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def of(device: torch.device) -> Device:
    """Return the ``Device`` object for a torch device."""
    return Cuda(device) if device.type == "cuda" else Device(device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class StreamHandle(ThreadHandle[R]):
    """An operation of the communication thread that queues its work on a ``stream`` of ``device``.

    The stream first waits for all work in the current stream, so earlier changes of ``tensors`` are complete.
    """

    def __init__(self, work: Work[R], device: Device, stream: Any, tensors: Iterable[object]) -> None:
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
        """Return, without waiting, whether the operation is complete on the GPU or has failed."""
        return super().done() and self._finished.query()

    def _hand_over(self) -> None:
        """Make this thread's current stream wait for the operation, whose work must have been queued."""
        stream = self._device.current()
        stream.wait_event(self._finished)
        _use_on(stream, self._result if isinstance(self._result, list) else [self._result])

    def on_its_stream(self) -> AbstractContextManager[object]:
        return self._device.on(self._stream)

    def synchronize(self) -> None:
        """Block the host until the GPU has completed the operation."""
        super().wait()
        self._finished.synchronize()


def submit(
    work: Work[R],
    device: torch.device | None,
    tensors: Iterable[object],
    thread: communication_thread.CommunicationThread | None = None,
) -> Handle[R]:
    """Queue an operation for the communication ``thread`` (default: this process's communication thread).

    Pass ``device`` if ``tensors`` are on a GPU. The operation then uses the thread's stream for this device.
    """
    thread = thread or communication_thread.current()
    if device is None:
        return thread.submit(work)
    own = of(device)
    if own not in thread.streams:
        thread.streams[own] = own.stream()
    return thread.enqueue(StreamHandle(work, own, thread.streams[own], tensors), work.entry)


def _use_on(stream: Any, tensors: Iterable[object]) -> None:
    """Keep the CUDA allocator from reusing the memory of ``tensors`` before the work on ``stream`` is complete."""
    for x in tensors:
        if isinstance(x, Tensor) and x.is_cuda:
            for part in (x._indices(), x._values()) if x.is_sparse else (x,):
                part.record_stream(stream)


class HostCopy:
    """A copy on the host of another device's tensor.

    The caller's thread creates this object, and another thread makes the copies.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._device = of(x.device)
        self._ready = self._device.event()
        self._ready.record(self._device.current())

    def to_host(self) -> Tensor:
        """Return a copy of the tensor in new host memory."""
        host = self.empty()
        self._in_order(lambda: host.copy_(self._x, non_blocking=True))
        return host

    def empty(self) -> Tensor:
        """Return new host memory, not initialized, for a copy of the tensor."""
        return torch.empty(self._x.shape, dtype=self._x.dtype, device="cpu", pin_memory=self._x.is_cuda)

    def from_host(self, host: Tensor, then: Callable[[], object] | None) -> None:
        """Copy ``host`` to the tensor, then call ``then``, which may queue more work on the stream of the copy."""

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
