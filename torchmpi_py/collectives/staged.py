"""Flavour ``staged``: GPU tensors through pinned host memory, where a flavour for CPU tensors does the work.

In chunks, of ``Tuning.gpu_chunk_bytes``: while one chunk is worked on by the ranks' processors, the next one comes
down from the GPU and the last one goes up (``host_slots.py``). It serves GPUs of any kind and number, on any number of
nodes. S bytes a rank go down and up for an allreduce of S. Point-to-point messages go in one piece, so that a GPU
tensor may meet a CPU tensor. Calls return when the last chunk is on its way up, ordered in the caller's stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torchmpi_py import devices
from torchmpi_py.channels import Channel
from torchmpi_py.collectives.flavour import Flavour
from torchmpi_py.collectives.gathering import Sizes
from torchmpi_py.collectives.host_slots import HostSlots
from torchmpi_py.collectives.schedule import chunks

if TYPE_CHECKING:
    from torchmpi_py.collectives.operation import Operation
    from torchmpi_py.handles import Handle

R = TypeVar("R")


class Staged(Flavour):
    """Through the host. ``inners``: flavours for the host's part, each with the least bytes of a chunk to take it for.

    The first that can serve is taken; ``point`` carries messages between two ranks.
    """

    name = "staged"

    def __init__(
        self, inners: Sequence[tuple[Flavour, int]], point: Flavour, devices: Iterable[str] = ("cuda",)
    ) -> None:
        self.inners = inners
        self.point = point
        self.devices = frozenset(devices)  # type: ignore[misc]  # tests carry it out on the host

    def missing(self, device: str) -> str:
        if device != "cuda" or torch.cuda.is_available():
            return ""
        return f"torch {torch.__version__} sees no CUDA device"

    def launch(self, operation: Operation[R]) -> Handle[R]:
        """Post messages between two ranks, and leave the rest to the communication thread.

        A send first waits, on the host, for the values to be there.
        """
        if operation.method not in ("send", "recv"):
            return super().launch(operation)
        x, peer = operation.arguments
        host, device = _on_host(x), devices.of(x.device)
        launched = device.event()
        launched.record(device.current())
        if operation.method == "send":
            host.copy_(x)

        def conclude(_: object) -> Any:
            if operation.method == "recv":
                device.current().wait_event(launched)  # it may be the stream of another thread
                x.copy_(host)
            return operation.target if operation.conclude is None else operation.conclude(None)

        posted = dataclasses.replace(operation, flavour=self.point, arguments=(host, peer), conclude=conclude)
        return self.point.launch(posted)

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        self._reduce(channel, source, destination, op, None)

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        self._reduce(channel, source, destination, op, root)

    def _reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int | None) -> None:
        x, out, slots = source.view(-1), destination.view(-1), _slots(channel, source)
        pieces = chunks(0, x.numel(), _step(slots, x))
        verb = "allreduce" if root is None else "reduce"

        def host(k: int) -> Tensor:
            return slots.given(k, x.dtype, pieces[k][1] - pieces[k][0])

        def work(k: int) -> None:
            given, inner = host(k), self._inner(verb, channel, host(k).nbytes)
            if root is None:
                inner.allreduce(channel, given, given, op)
            else:
                inner.reduce(channel, given, given, op, root)

        def put(k: int) -> None:
            if root in (None, channel.rank):
                out[slice(*pieces[k])].copy_(host(k), non_blocking=True)

        slots.pipeline(len(pieces), lambda k: host(k).copy_(x[slice(*pieces[k])], non_blocking=True), work, put)

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        line, slots = x.view(-1), _slots(channel, x)
        pieces = chunks(0, line.numel(), _step(slots, line))

        def host(k: int) -> Tensor:
            return slots.given(k, line.dtype, pieces[k][1] - pieces[k][0])

        def fetch(k: int) -> None:
            if channel.rank == root:
                host(k).copy_(line[slice(*pieces[k])], non_blocking=True)

        def work(k: int) -> None:
            self._inner("broadcast", channel, host(k).nbytes).broadcast(channel, host(k), root)

        def put(k: int) -> None:
            if channel.rank != root:
                line[slice(*pieces[k])].copy_(host(k), non_blocking=True)

        slots.pipeline(len(pieces), fetch, work, put)

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        self._by_rows("reduce_scatter", channel, source, destination.view(1, -1), op)

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        self._by_rows("alltoall", channel, source, destination.view(channel.size, -1))

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        self._by_rows("scatter", channel, source, destination.view(1, -1), root, gives=channel.rank == root)

    def _by_rows(
        self, verb: str, channel: Channel, source: Tensor, out: Tensor, *options: object, gives: bool = True
    ) -> None:
        """Verbs whose input has a row for each rank; ``out`` has as many rows as the result."""
        rows, slots = source.view(channel.size, -1), _slots(channel, source)
        pieces = chunks(0, rows.shape[1], _step(slots, rows, channel.size))

        def part(where: Any, k: int, num_rows: int) -> Tensor:
            width = pieces[k][1] - pieces[k][0]
            return where(k, rows.dtype, num_rows * width).view(num_rows, width)  # type: ignore[no-any-return]

        def fetch(k: int) -> None:
            if gives:
                part(slots.given, k, channel.size).copy_(rows[:, slice(*pieces[k])], non_blocking=True)

        def work(k: int) -> None:
            given, received = part(slots.given, k, channel.size), part(slots.received, k, out.shape[0])
            inner = self._inner(verb, channel, given.nbytes)
            getattr(inner, verb)(channel, given.view(-1), received.view(-1), *options)

        def put(k: int) -> None:
            out[:, slice(*pieces[k])].copy_(part(slots.received, k, out.shape[0]), non_blocking=True)

        slots.pipeline(len(pieces), fetch, work, put)

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        self._gather(channel, x, list(sizes.split(out)), sizes, None)

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        self._gather(channel, x, None if out is None else list(sizes.split(out)), sizes, root)

    def _gather(self, channel: Channel, x: Tensor, parts: list[Tensor] | None, sizes: Sizes, root: int | None) -> None:
        line, slots, itemsize = x.view(-1), _slots(channel, x), x.itemsize
        lines = [part.view(-1) for part in parts or []]
        totals = [num_bytes // itemsize for num_bytes in sizes.num_bytes]
        pieces = chunks(0, max(totals), _step(slots, line, channel.size))

        def counts(k: int) -> list[int]:
            begin, end = pieces[k]
            return [max(0, min(total, end) - begin) for total in totals]

        def given(k: int) -> Tensor:
            return slots.given(k, line.dtype, counts(k)[channel.rank])

        def work(k: int) -> None:
            rows = counts(k)
            piece = Sizes(rows, [row * itemsize for row in rows], [0] * channel.size)
            received = slots.received(k, line.dtype, sum(rows))
            inner = self._inner("allgather" if root is None else "gather", channel, received.nbytes)
            if root is None:
                inner.allgather(channel, given(k), received, piece)
            else:
                inner.gather(channel, given(k), None if parts is None else received, root, piece)

        def put(k: int) -> None:
            rows = counts(k)
            received = torch.split(slots.received(k, line.dtype, sum(rows)), rows)
            for mine, got in zip(lines, received, strict=False):
                mine[slice(*pieces[k])].copy_(got, non_blocking=True)

        def fetch(k: int) -> None:
            given(k).copy_(line[slice(*pieces[k])], non_blocking=True)

        slots.pipeline(len(pieces), fetch, work, put)

    def sendreceive(self, channel: Channel, x: Tensor, out: Tensor, source: int, destination: int) -> None:
        sent, received = _on_host(x).copy_(x), _on_host(out)
        self.point.sendreceive(channel, sent, received, source, destination)
        out.copy_(received)

    def send(self, channel: Channel, x: Tensor, destination: int) -> None:
        self.point.send(channel, _on_host(x).copy_(x), destination)

    def recv(self, channel: Channel, x: Tensor, source: int) -> None:
        host = _on_host(x)
        self.point.recv(channel, host, source)
        x.copy_(host)

    def _inner(self, verb: str, channel: Channel, num_bytes: int) -> Flavour:
        """The flavour that does the host's part."""
        return next(
            flavour
            for flavour, least_bytes in self.inners
            if num_bytes >= least_bytes
            and flavour.implements(verb)
            and not flavour.missing("cpu")
            and not flavour.refuses(channel)
        )


def _slots(channel: Channel, x: Tensor) -> HostSlots:
    return channel.keep((HostSlots, x.device), lambda made: HostSlots(made, x.device))


def _step(slots: HostSlots, x: Tensor, num_rows: int = 1) -> int:
    """Columns of a chunk."""
    return max(1, slots.chunk_bytes // (num_rows * x.itemsize))


def _on_host(x: Tensor) -> Tensor:
    """Memory of the host for a copy of ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
