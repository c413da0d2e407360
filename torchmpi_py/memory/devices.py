"""Devices: the order of work on them (streams and events), operations on a stream, and copies on the host.

A *stream* is a queue of work that a GPU carries out in order; an *event* is a point in a stream, for which another
stream, or the host, can wait. The host has streams and events in name only: work is done when a call returns. So code
for GPUs also runs on the host, where tests check its logic.

The communication thread carries out asynchronous operations on GPU tensors, with a stream of its own as the current
one. That stream first waits for the work that the launching thread's current stream held at the launch, so the
operation sees the tensors as the caller left them. ``wait`` makes the waiting thread's current stream wait for the
operation, and returns when its work has been queued; ``synchronize`` and ``done`` are about the GPU.

A parameter server exchanges GPU tensors through pinned memory of the host (``HostCopy``): the client's thread copies,
on a stream of its own, after the work that the caller's stream held at the call. The copy is complete when the handle
is: no stream needs to wait for it.
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
_pin_failures: list[int] = []  # the first error code of this process


class HostStream:
    """Stream and event of the host, where work is done when a call returns; their methods are those of CUDA's.

    An event that was never recorded is past.
    """

    def wait_event(self, event: object) -> None:
        """Let what is queued later wait for ``event``."""

    def record(self, stream: object) -> None:
        """Make this event the present end of ``stream``."""

    def synchronize(self) -> None:
        """Block the host until the work is done."""

    def query(self) -> bool:
        """Whether the event is past."""
        return True


_HOST_STREAM = HostStream()


class Device:
    """The operations of a device that flavours use. This class serves the host; ``Cuda`` derives from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Any:
        """The stream that this thread's work goes to."""
        return _HOST_STREAM

    def stream(self) -> Any:
        """A new stream of high priority."""
        return _HOST_STREAM

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Let this thread's work go to ``stream``."""
        return contextlib.nullcontext()

    def event(self) -> Any:
        """A new event."""
        return _HOST_STREAM

    def pin(self, x: Tensor) -> None:
        """Page-lock the host memory of ``x``, for copies to and from the device. ``unpin`` undoes this."""

    def unpin(self, x: Tensor) -> None:
        """Undo ``pin``, before the memory is freed."""

    def synchronize(self) -> None:
        """Block the host until all work of this process on the device is done."""

    def is_capturing(self) -> bool:
        """Whether this thread's work is recorded into a graph, instead of carried out."""
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
        # The device first: else a thread on another device would take memory there when it returns to it.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pin(self, x: Tensor) -> None:
        """Pin ``x``. If CUDA refuses (a limit on locked memory, say) copies block the host; one warning says so."""
        code = int(_runtime().cudaHostRegister(x.data_ptr(), x.nbytes, 0))
        if code == 0:
            self._pinned.add(x.data_ptr())
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)  # raises CUDA's error here, or the next kernel would
        if not _pin_failures:
            _pin_failures.append(code)
            logger.warning("CUDA cannot pin %d bytes of shared memory (error %d): staging is slower", x.nbytes, code)

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
    """The ``Device`` of a torch device."""
    return Cuda(device) if device.type == "cuda" else Device(device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class StreamHandle(ThreadHandle[R]):
    """An operation in the communication thread whose work goes to a ``stream`` of ``device``.

    The stream first waits for all that the current stream holds now, so the operation sees ``tensors`` as they are.
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
        """Whether the GPU has carried out the operation, or the operation has failed; never blocks."""
        return super().done() and self._finished.query()

    def _hand_over(self) -> None:
        """Make this thread's current stream wait for the operation; the host has waited until the work was queued."""
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
            for part in (x._indices(), x._values()) if x.is_sparse else (x,):
                part.record_stream(stream)


class HostCopy:
    """The copy on the host of a tensor of another device. Made in the caller's thread, used in the one that copies."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._device = of(x.device)
        self._ready = self._device.event()
        self._ready.record(self._device.current())

    def to_host(self) -> Tensor:
        """The values of the tensor, in new memory of the host."""
        host = self.empty()
        self._in_order(lambda: host.copy_(self._x, non_blocking=True))
        return host

    def empty(self) -> Tensor:
        """New memory of the host for the values of the tensor."""
        return torch.empty(self._x.shape, dtype=self._x.dtype, device="cpu", pin_memory=self._x.is_cuda)

    def from_host(self, host: Tensor, then: Callable[[], object] | None) -> None:
        """Copy values from the host to the tensor, then call ``then`` in the same stream."""

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
