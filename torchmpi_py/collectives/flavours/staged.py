"""Flavour ``staged``: GPU tensors are copied to pinned host memory, where a flavour for CPU tensors does the work.

The work is done in chunks of ``Tuning.gpu_chunk_bytes``. While the CPUs work on chunk k, chunk k+1 is copied down from
the GPU, and chunk k-1 is copied up to the GPU. Each direction has its own stream. The flavour serves all GPUs that
torch supports, on any number of nodes. An allreduce of S bytes copies S bytes per rank down, and S bytes up. Messages
between two ranks travel in one piece, so that a GPU tensor can match a CPU tensor. A call returns when the last copy to
the GPU has been queued. Later work in the caller's stream waits for this copy.

Three *slots* alternate. Each slot has one part for inputs and one part for results. A slot is filled again only after
its results have been copied to the GPU. The slots are in symmetric memory, or in ordinary memory if the ranks cannot
share memory, and CUDA pins them. If the CPU flavour reduces the slots in place, a chunk is copied only twice, down and
up.

Alternative: pass GPU memory to MPI. It is not used here because it needs a CUDA-aware MPI.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives.flavour import Flavour, Sizes
from torchmpi_py.collectives.flavours.schedule import chunks
from torchmpi_py.collectives.plan import Operation, Plan, Post
from torchmpi_py.core import config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.handles import Handle
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import devices, symmetric

NUM_SLOTS = 3
GIVEN, RECEIVED = 0, 1


class Staged(Flavour):
    """Collectives of GPU tensors through the host.

    ``inners`` lists (flavour for CPU tensors, smallest chunk in bytes for this flavour). The first flavour that can
    serve a chunk is used. ``point`` is the flavour that carries messages between two ranks.
    """

    name = "staged"

    def __init__(
        self, inners: Sequence[tuple[Flavour, int]], point: Flavour, devices: Iterable[str] = ("cuda",)
    ) -> None:
        self.inners = inners
        self.point = point
        self.devices = frozenset(devices)  # type: ignore[misc]  # Tests use the flavour on the host.

    def missing(self, device: str) -> str:
        if device != "cuda" or torch.cuda.is_available():
            return ""
        return f"torch {torch.__version__} sees no CUDA device"

    def bind(self, plan: Plan) -> tuple[Callable[..., Any], Post | None]:
        """Return (work, post) of a plan; ``post`` is only for send and recv."""
        work, post = super().bind(plan)
        if plan.name in ("send", "recv"):
            post = functools.partial(_post_on_host, self.point.bind(plan)[1])  # type: ignore[arg-type]
        return work, post

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        self._by_rows("allreduce", channel, source.view(1, -1), destination.view(1, -1), op)

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        takes = channel.rank == root
        self._by_rows("reduce", channel, source.view(1, -1), destination.view(1, -1), op, root, takes=takes)

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        x, is_root = x.view(1, -1), channel.rank == root
        self._by_rows("broadcast", channel, x, x, root, gives=is_root, takes=not is_root)

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        self._by_rows("reduce_scatter", channel, source.view(channel.size, -1), destination.view(1, -1), op)

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        self._by_rows("alltoall", channel, source.view(channel.size, -1), destination.view(channel.size, -1))

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        rows, gives = source.view(channel.size, -1), channel.rank == root
        self._by_rows("scatter", channel, rows, destination.view(1, -1), root, gives=gives)

    def _by_rows(
        self,
        verb: str,
        channel: Channel,
        rows: Tensor,
        out: Tensor,
        *options: object,
        gives: bool = True,
        takes: bool = True,
    ) -> None:
        """Carry out a collective that treats each column separately.

        ``rows`` has one row, or one row per rank. In allreduce, reduce and broadcast the result replaces the input in
        the slot. If ``gives`` is true, this rank's values are copied to the host. If ``takes`` is true, the result is
        copied to this rank's GPU.
        """
        slots, is_in_place = _slots(channel, rows), verb in ("allreduce", "reduce", "broadcast")
        pieces = chunks(0, rows.shape[1], max(1, slots.chunk_bytes // (rows.shape[0] * rows.itemsize)))

        def part(k: int, which: int, num_rows: int) -> Tensor:
            width = pieces[k][1] - pieces[k][0]
            return slots.part(k, which, rows.dtype, num_rows * width).view(num_rows, width)

        def given(k: int) -> Tensor:
            return part(k, GIVEN, rows.shape[0])

        def received(k: int) -> Tensor:
            return given(k) if is_in_place else part(k, RECEIVED, out.shape[0])

        def fetch(k: int) -> None:
            if gives:
                given(k).copy_(rows[:, slice(*pieces[k])], non_blocking=True)

        def work(k: int) -> None:
            x = given(k).view(-1)
            tensors = (x,) if verb == "broadcast" else (x, received(k).view(-1))
            getattr(self._inner(verb, channel, x.nbytes), verb)(channel, *tensors, *options)

        def put(k: int) -> None:
            if takes:
                out[:, slice(*pieces[k])].copy_(received(k), non_blocking=True)

        slots.pipeline(len(pieces), fetch, work, put)

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        self._gather("allgather", channel, x, out, sizes)

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        self._gather("gather", channel, x, out, sizes, root)

    def _gather(self, verb: str, channel: Channel, x: Tensor, out: Tensor | None, sizes: Sizes, *root: int) -> None:
        line, slots = x.view(-1), _slots(channel, x)
        lines = [] if out is None else [part.view(-1) for part in sizes.split(out)]
        totals = [num_bytes // x.itemsize for num_bytes in sizes.num_bytes]
        # Ranks with fewer elements have empty parts in the last chunks.
        pieces = chunks(0, max(totals), max(1, slots.chunk_bytes // (channel.size * x.itemsize)))

        def counts(k: int) -> list[int]:
            begin, end = pieces[k]
            return [max(0, min(total, end) - begin) for total in totals]

        def given(k: int) -> Tensor:
            return slots.part(k, GIVEN, x.dtype, counts(k)[channel.rank])

        def received(k: int) -> Tensor:
            return slots.part(k, RECEIVED, x.dtype, sum(counts(k)))

        def fetch(k: int) -> None:
            given(k).copy_(line[slice(*pieces[k])], non_blocking=True)

        def work(k: int) -> None:
            rows, result = counts(k), received(k)
            piece = Sizes(rows, [row * x.itemsize for row in rows], [0] * channel.size)
            call = getattr(self._inner(verb, channel, result.nbytes), verb)
            call(channel, given(k), None if out is None else result, *root, piece)

        def put(k: int) -> None:
            for target, part in zip(lines, torch.split(received(k), counts(k)), strict=False):
                target[slice(*pieces[k])].copy_(part, non_blocking=True)

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
        """Return the flavour that does the work of a chunk of ``num_bytes`` on the host."""
        return next(
            flavour
            for flavour, least_bytes in self.inners
            if num_bytes >= least_bytes
            and flavour.implements(verb)
            and not flavour.missing("cpu")
            and not flavour.refuses(channel)
        )


class HostSlots:
    """This rank's slots for tensors on ``device``. The channel keeps this object between calls."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.chunk_bytes = config.current.gpu_chunk_bytes
        self._device = devices.of(device)
        self._part_bytes = -(-self.chunk_bytes // 64) * 64
        num_bytes = 2 * NUM_SLOTS * self._part_bytes
        host = torch.device("cpu")
        try:
            self._memory = symmetric.memory(channel, num_bytes, host)
        except Unavailable:  # Every rank raises it.
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=host)
        self._device.pin(self._memory)
        self._down, self._up = self._device.stream(), self._device.stream()
        self._came = [self._device.event() for _ in range(NUM_SLOTS)]
        self._left = [self._device.event() for _ in range(NUM_SLOTS)]

    def part(self, chunk: int, which: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return ``count`` elements of a chunk's slot: of the part for inputs (GIVEN), or for results (RECEIVED)."""
        begin = (2 * (chunk % NUM_SLOTS) + which) * self._part_bytes
        return self._memory[begin : begin + count * dtype.itemsize].view(dtype)

    def pipeline(
        self,
        num_chunks: int,
        fetch: Callable[[int], object],
        work: Callable[[int], object],
        put: Callable[[int], object],
    ) -> None:
        """Copy each chunk down (``fetch``), process it on the host (``work``), and copy its result up (``put``).

        The copies wait for earlier work in the current stream, and later work in this stream waits for the copies. The
        host does not wait for the last copies up.
        """
        current, begin = self._device.current(), self._device.event()
        begin.record(current)
        self._down.wait_event(begin)  # Only ``_down`` must wait, because a copy up follows its copy down.
        for chunk in range(num_chunks + 1):
            if chunk < num_chunks:  # Start the copy of the next chunk from the GPU.
                with self._device.on(self._down):
                    self._down.wait_event(self._left[chunk % NUM_SLOTS])
                    fetch(chunk)
                    self._came[chunk % NUM_SLOTS].record(self._down)
            if chunk > 0:  # During this copy, work on the previous chunk, and start the copy of its result to the GPU.
                before = chunk - 1
                self._came[before % NUM_SLOTS].synchronize()
                work(before)
                with self._device.on(self._up):
                    put(before)
                    self._left[before % NUM_SLOTS].record(self._up)
        for event in self._left:
            current.wait_event(event)

    def free(self) -> None:
        """Wait until all copies are complete, and release the slots."""
        self._device.synchronize()
        self._device.unpin(self._memory)
        del self._memory


def _slots(channel: Channel, x: Tensor) -> HostSlots:
    """Return the channel's slots for the device of ``x``."""
    return channel.keep((HostSlots, x.device), lambda made: HostSlots(made, x.device))


def _post_on_host(post: Post, operation: Operation[Any]) -> Handle[Any]:
    """Post a send or a recv of ``operation`` with a copy of the tensor on the host.

    Before a send, the host waits until the copy is complete.
    """
    (x,), is_send = operation.arguments, operation.plan.name == "send"
    host, device = _on_host(x), devices.of(x.device)
    launched = device.event()
    launched.record(device.current())
    if is_send:
        host.copy_(x)

    def conclude(_: object) -> Any:
        if not is_send:
            device.current().wait_event(launched)  # The current stream may have changed since the launch.
            x.copy_(host)
        return operation.target if operation.conclude is None else operation.conclude(None)

    return post(dataclasses.replace(operation, arguments=(host,), conclude=conclude))


def _on_host(x: Tensor) -> Tensor:
    """Return new host memory for a copy of ``x``, pinned if ``x`` is on a GPU."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
