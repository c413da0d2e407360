"""Devices: the order of work on them (streams and events), operations on a stream, and copies on the host.

A *stream* is a queue of work that a GPU carries out in order. An *event* is a point in a stream, for which another
stream or the host can wait. The host has streams and events in name only, because its work is done when a call returns.
So code for GPUs also runs on the host, where tests check its logic.

The communication thread carries out asynchronous operations on GPU tensors, with its own stream as the current one.
This stream first waits for the work in the launching thread's current stream, so the operation sees the tensors as the
caller left them. ``wait`` makes the waiting thread's current stream wait for the operation, and returns when its work
has been queued. ``synchronize`` and ``done`` refer to the work on the GPU.

A parameter server exchanges GPU tensors through pinned host memory (``HostCopy``). The client's thread copies on a
stream of its own, after the work that was in the caller's stream at the call. The copy is complete when its handle is,
so no stream needs to wait for it.
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
_pin_failures: list[int] = []  # the first error code in this process


class HostStream:
    """The host's stream and event, with the methods of CUDA's; work is done when a call returns.

    An event that was never recorded counts as complete.
    """

    def wait_event(self, event: object) -> None:
        """Let work that is queued later wait for ``event``."""

    def record(self, stream: object) -> None:
        """Move this event to the current end of ``stream``."""

    def synchronize(self) -> None:
        """Block the host until the work is done."""

    def query(self) -> bool:
        """Return whether the event is complete."""
        return True


_HOST_STREAM = HostStream()


class Device:
    """The operations of a device that flavours use. This class serves the host; ``Cuda`` derives from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Any:
        """Return the stream that takes this thread's work."""
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
        """Undo ``pin``; call it before the memory is freed."""

    def synchronize(self) -> None:
        """Block the host until all work of this process on the device is done."""

    def is_capturing(self) -> bool:
        """Return whether this thread's work is recorded into a graph instead of carried out."""
        return False


class Cuda(Device):
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pinned: set[int] = set()

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        # Enter the device first. Otherwise torch restores the stream of another device, and takes memory there.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pin(self, x: Tensor) -> None:
        """Pin ``x``. If CUDA refuses (a limit on locked memory, for example), warn once; copies then block the host."""
        code = int(_runtime().cudaHostRegister(x.data_ptr(), x.nbytes, 0))
        if code == 0:
            self._pinned.add(x.data_ptr())
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)  # This call raises CUDA's error, which the next kernel would raise.
        if not _pin_failures:
            _pin_failures.append(code)
            logger.warning("CUDA cannot pin %d bytes of shared memory (error %d): copies are slower", x.nbytes, code)

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
    """Return the ``Device`` of a torch device."""
    return Cuda(device) if device.type == "cuda" else Device(device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class StreamHandle(ThreadHandle[R]):
    """An operation in the communication thread whose work goes to a ``stream`` of ``device``.

    The stream first waits for all work in the current stream, so the operation sees ``tensors`` as they are now.
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
        """Return whether the GPU has carried out the operation, or the operation has failed. Never blocks."""
        return super().done() and self._finished.query()

    def _hand_over(self) -> None:
        """Make this thread's current stream wait for the operation. The host has already waited for the queueing."""
        stream = self._device.current()
        stream.wait_event(self._finished)
        _use_on(stream, self._result if isinstance(self._result, list) else [self._result])

    def on_its_stream(self) -> AbstractContextManager[object]:
        return self._device.on(self._stream)

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
    """Queue an operation for the communication ``thread`` (default: the thread of this process).

    If ``tensors`` are on a GPU (``device``), the operation uses a stream of that thread.
    """
    thread = thread or communication_thread.current()
    if device is None:
        return thread.submit(work)
    own = of(device)
    if own not in thread.streams:
        thread.streams[own] = own.stream()
    return thread.enqueue(StreamHandle(work, own, thread.streams[own], tensors), work.entry)


def _use_on(stream: Any, tensors: Iterable[object]) -> None:
    """Keep CUDA's allocator from reusing the memory of ``tensors`` before ``stream`` has finished with it."""
    for x in tensors:
        if isinstance(x, Tensor) and x.is_cuda:
            for part in (x._indices(), x._values()) if x.is_sparse else (x,):
                part.record_stream(stream)


class HostCopy:
    """A copy on the host of another device's tensor. The caller's thread creates it; another thread copies."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._device = of(x.device)
        self._ready = self._device.event()
        self._ready.record(self._device.current())

    def to_host(self) -> Tensor:
        """Return the values of the tensor in new host memory."""
        host = self.empty()
        self._in_order(lambda: host.copy_(self._x, non_blocking=True))
        return host

    def empty(self) -> Tensor:
        """Return new host memory for the values of the tensor."""
        return torch.empty(self._x.shape, dtype=self._x.dtype, device="cpu", pin_memory=self._x.is_cuda)

    def from_host(self, host: Tensor, then: Callable[[], object] | None) -> None:
        """Copy values from the host to the tensor, then call ``then`` on the same stream."""

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
