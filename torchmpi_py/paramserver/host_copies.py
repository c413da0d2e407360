"""Tensors on a GPU, as a parameter server exchanges them: by way of pinned memory of the host.

The client's thread copies, on a stream of its own, once the stream of the caller has come to where the call was made. A
handle that is complete has been copied to the end: no stream needs to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchmpi_py import devices


class HostCopy:
    """The copy on the host of a flat tensor on another device. Made in the caller's thread, used in the client's."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._device = devices.of(x.device)
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
