"""Asynchronous operations on GPU tensors.

The communication thread carries them out, with a stream of its own as the current one: that stream first waits for what
the launching thread's current stream held at the launch, so that the operation sees the tensors as the caller left
them. ``wait`` makes the waiting thread's current stream wait for the operation, and returns when its work has been
queued, not when the GPU has done it; ``synchronize`` and ``done`` are about the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torchmpi_py import communication_thread, devices
from torchmpi_py.handles import Handle, ThreadHandle, Work

if TYPE_CHECKING:
    from torchmpi_py.devices import Device, Stream

R = TypeVar("R")


class StreamHandle(ThreadHandle[R]):
    """An operation in the communication thread whose work goes to a stream."""

    def __init__(self, work: _OnStream) -> None:
        super().__init__(work)
        self._device, self._finished = work.device, work.finished

    def done(self) -> bool:
        """Whether the GPU has carried it out, or it has failed; never blocks."""
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


class _OnStream:
    """An operation as work for the communication thread, on a stream."""

    def __init__(self, work: Work[Any], device: Device, stream: Stream, tensors: Iterable[object]) -> None:
        self.device = device
        self.label, self.finish, self.explain = work.label, work.finish, work.explain
        self.noted, self.who_is_late = getattr(work, "noted", None), getattr(work, "who_is_late", str)
        self.on_settled = getattr(work, "on_settled", None)
        self.finished = device.event()
        self._work = work
        self._stream = stream
        self._ready = device.event()
        self._ready.record(device.current())
        _use_on(self._stream, tensors)

    def run_in_background(self) -> Any:
        with self.device.on(self._stream):
            self._stream.wait_event(self._ready)
            try:
                return self._work.run_in_background()
            finally:
                self.finished.record(self._stream)


def submit(
    work: Work[R],
    device: torch.device | None,
    tensors: Iterable[object],
    thread: communication_thread.CommunicationThread | None = None,
) -> Handle[R]:
    """Queue an operation for the communication ``thread`` (default: that of the process).

    It goes to a stream of that thread if its ``tensors`` are on a GPU (``device``).
    """
    thread = thread or communication_thread.current()
    if device is None:
        return thread.submit(work)
    used = devices.of(device)
    if used not in thread.streams:
        thread.streams[used] = used.stream()
    return thread.submit(_OnStream(work, used, thread.streams[used], tensors), StreamHandle)


def _use_on(stream: Any, tensors: Iterable[object]) -> None:
    """Keep CUDA's allocator from giving their memory to others before the stream is through with it."""
    for x in tensors:
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(stream)
