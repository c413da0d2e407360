"""Flavour ``cudaipc``: collectives through GPU memory that the ranks of a node map, with one or several ranks per GPU.

Like flavour ``shared``, this flavour works on peer views (``two_shot.py``), but on the caller's stream. An allreduce
works in place if the result is symmetric: each rank reduces the slice that it owns, and stores the result into the
tensors of all peers. In the other collectives every rank reads the data that it needs from its peers. For an allreduce
of S bytes each rank reads S and writes S. If the result is not symmetric, the rank also copies S into scratch memory
and S out of it.

Every collective is an *exchange*, in which every rank exposes a tensor of the same shape to its peers. The tensor
consists of rows and *columns*, and a rank exposes all columns together or some of them at a time. If the caller's
tensors are symmetric on all ranks, each rank exposes the caller's tensor (its *home*) with all columns. Otherwise a
rank exposes a piece of the channel's *scratch* memory. Scratch memory is large enough for the largest tensor so far, up
to ``Tuning.gpu_scratch_bytes``. A larger tensor needs several pieces. The steps for each piece:

1. ``fill``: write this rank's columns into the exposed tensor, on the current stream; record the event READY
2. barrier (the first barrier also compares headers, and shows whether all ranks have homes); wait for all READY events
3. ``work`` on the tensors of all ranks; record the event DONE
4. barrier; wait for all DONE events, then ``drain``: copy the results that the peers wrote into the exposed tensor

The waits for events are queued on the current stream. Consecutive exchanges may run on different streams, so each
exchange first waits for the previous exchange in the same way. The host makes two barriers per piece, whatever the
number of ranks, and never waits for a GPU. An exchange needs a third barrier if a rank has no tensor to expose before
the first barrier, because scratch memory must be allocated or enlarged. It also needs a third barrier if the exposed
tensors belong to different segments, for example if only some ranks have homes.

Alternative: rings, as in TorchMPI's cudaIPC collectives. Their ranks synchronized on the host 2 (P-1) + 1 times, and a
ring waited only for the local stream. Here ranks synchronize twice, and wait for the streams of all ranks.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchmpi_py.collectives.flavour import Flavour, Sizes
from torchmpi_py.collectives.flavours import two_shot
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.collectives.flavours.schedule import chunks
from torchmpi_py.collectives.reductions import Kernel, kernel
from torchmpi_py.core import config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.tensors import copy_to
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import devices, gpus, symmetric
from torchmpi_py.memory.cuda_ipc import DONE, READY, peer_events

_LEAST_BYTES = 1 << 20
T = TypeVar("T")
Columns = Callable[[T, int, int], None]
"""A function whose arguments are one rank's tensor or all ranks' tensors, and the begin and end of the columns."""


class CudaIpc(Flavour):
    """Collectives through GPU memory that all ranks of a channel map."""

    name = "cudaipc"
    exchanges_headers = True

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = frozenset(devices)  # type: ignore[misc]  # Tests use the flavour on the host.

    def missing(self, device: str) -> str:
        return symmetric.unavailable_because or (gpus.why_no_ipc() if device == "cuda" else "")

    def refuses(self, channel: Channel) -> str:
        if channel.num_nodes > 1:
            return f"the ranks span {channel.num_nodes} nodes; cudaipc works on one node"
        return "" if gpus.table() is None else gpus.why_no_ipc(channel.places)

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        group, how = _group(channel, source), kernel(source.dtype, op)
        x, out = source.view(1, -1), destination.view(1, -1)

        def work(views: Sequence[Tensor], begin: int, end: int) -> None:
            lines = [view.view(-1) for view in views]
            two_shot.carry_out(two_shot.allreduce(lines, lines, channel.rank, config.current.gpu_cache_bytes), how)

        def drain(shown: Tensor, begin: int, end: int) -> None:
            copy_to(out[:, begin:end], shown)

        group.run(dataclasses.replace(_showing(f"allreduce with {op}", x, work), home=out, drain=drain))

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        group, how, out = _group(channel, source), kernel(source.dtype, op), destination.view(-1)
        work = _reduction(out if channel.rank == root else None, 0, how)
        group.run(_showing(f"reduce with {op} to root {root}", source.view(1, -1), work))

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        group, how, out = _group(channel, source), kernel(source.dtype, op), destination.view(-1)
        work = _reduction(out, channel.rank, how)
        group.run(_showing(f"reduce_scatter with {op}", source.view(channel.size, -1), work))

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        group, is_root = _group(channel, x), channel.rank == root
        work = _reads([] if is_root else [(x.view(-1), root, 0)])
        group.run(_showing(f"broadcast from root {root}", x.view(1, -1), work, shows=is_root))

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        group, x = _group(channel, source), source.view(channel.size, -1)
        work = _reads([(destination.view(-1), root, channel.rank)])
        group.run(_showing(f"scatter from root {root}", x, work, shows=channel.rank == root))

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        group, rows = _group(channel, source), destination.view(channel.size, -1)
        work = _reads([(row, rank, channel.rank) for rank, row in enumerate(rows)])
        group.run(_showing("alltoall", source.view(channel.size, -1), work))

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        self.gather(channel, x, out, channel.rank, sizes)

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        """Expose this rank's ``x``, whose size may differ between ranks. Ranks with ``out`` read every rank's ``x``."""
        group, x = _group(channel, x), x.view(-1)
        work = _reads([] if out is None else [(part.view(-1), rank, 0) for rank, part in enumerate(sizes.split(out))])

        def fill(shown: Tensor, begin: int, end: int) -> None:
            mine = x[begin:end]
            shown[0, : mine.numel()].copy_(mine)

        group.run(IpcExchange("gather", x, (1, max(sizes.num_bytes) // x.itemsize), work, fill=fill))


def _reduction(out: Tensor | None, row: int, how: Kernel) -> Columns[Sequence[Tensor]]:
    """Return a function that reduces one row of all ranks' tensors into the flat ``out``; without ``out``, a no-op."""

    def work(views: Sequence[Tensor], begin: int, end: int) -> None:
        if out is not None:
            rows, target = [view[row] for view in views], out[begin:end]
            two_shot.carry_out(two_shot.plan(rows, [target], (0, end - begin), config.current.gpu_cache_bytes), how)

    return work


def _reads(moves: Sequence[tuple[Tensor, int, int]]) -> Columns[Sequence[Tensor]]:
    """Return a function that fills flat tensors from peers; ``moves`` lists (tensor, rank to read from, row)."""

    def work(views: Sequence[Tensor], begin: int, end: int) -> None:
        for line, rank, row in moves:
            piece = line[begin:end]
            piece.copy_(views[rank][row, : piece.numel()])

    return work


def _showing(what: str, x: Tensor, work: Columns[Sequence[Tensor]], *, shows: bool = True) -> IpcExchange:
    """Return an exchange in which ranks read from ``x``; without ``shows``, no rank reads this rank's ``x``."""

    def fill(shown: Tensor, begin: int, end: int) -> None:
        if shows:
            copy_to(shown, x[:, begin:end])

    return IpcExchange(what, x, (x.shape[0], x.shape[1]), work, home=x, fill=fill)


def _group(channel: Channel, x: Tensor) -> IpcGroup:
    """Return the channel's ``IpcGroup`` for the device of ``x``."""
    return channel.keep((IpcGroup, x.device), lambda made: IpcGroup(made, x.device))


def _nothing(shown: Tensor, begin: int, end: int) -> None:
    """Do nothing; the ``fill`` or ``drain`` of a collective that has no such step."""


@dataclasses.dataclass
class IpcExchange:
    """The description of an exchange: what each rank exposes, and the callbacks for the steps of the exchange.

    ``fill``, ``work`` and ``drain`` get tensors with all rows, and with the columns from begin to end.
    """

    what: str
    x: Tensor
    shape: tuple[int, int]  # rows and columns; equal on all ranks if all make the same call
    work: Columns[Sequence[Tensor]]
    home: Tensor | None = None
    fill: Columns[Tensor] = _nothing
    drain: Columns[Tensor] = _nothing


class IpcGroup:
    """Scratch memory and events of a channel whose ranks can map each other's memory on ``device``.

    The channel keeps this object between calls.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.node = channel.keep(NodeGroup, NodeGroup)
        self._channel, self._device = channel, device
        self._events = peer_events(channel, device)
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._most_bytes = sys.maxsize  # largest size of scratch memory that could be allocated

    def run(self, exchange: IpcExchange) -> None:
        """Carry out an exchange on the current stream. All ranks of the channel must call it."""
        self._events.enter()  # The previous exchange may have run on another stream.
        try:
            self._carry_out(exchange)
        finally:
            self._events.leave()

    def _carry_out(self, exchange: IpcExchange) -> None:
        # Step 1, for the first piece: fill the tensor that this rank exposes, if there is one already.
        shown = self._shown_first(exchange)
        if shown is not None:
            exchange.fill(shown, 0, shown.shape[1])
        self._events.record(READY)
        # Step 2: exchange headers with the place of the exposed tensor. An empty tensor means that there is none yet.
        place = exchange.x[:0] if shown is None else shown.reshape(-1)
        num_columns, count = exchange.shape[1], math.prod(exchange.shape)
        headers = self.node.exchange_headers(exchange.what, place, count=count)
        if not count:
            return
        if headers.read is None:
            # The tensors belong to different segments, or a rank has too little scratch memory. So all ranks use
            # scratch memory, and repeat step 1.
            shown = None
            self._make_room(count * exchange.x.itemsize)
        elif shown is not None and shown.shape[1] == num_columns:
            # One piece is enough, because all tensors are homes or fit into scratch memory.
            self._finish(exchange, shown, headers.read, 0, num_columns)
            return
        for begin, end in chunks(0, num_columns, self._step(exchange)):
            if begin or shown is None:  # Steps 1 and 2 have not been done for this piece.
                shown = self._piece(exchange, end - begin)
                exchange.fill(shown, begin, end)
                self._events.record(READY)
                self.node.barrier()
            self._finish(exchange, shown, [0] * self._channel.size, begin, end)

    def _shown_first(self, exchange: IpcExchange) -> Tensor | None:
        """Return the home, or else the first piece of scratch memory; None if there is too little scratch memory."""
        if exchange.home is not None:
            location = symmetric.find(exchange.home)
            if location is not None and self.node.is_within(location[0]):
                return exchange.home.view(exchange.shape)
        num_bytes = math.prod(exchange.shape) * exchange.x.itemsize
        if not num_bytes or self._scratch.numel() < self._wanted_bytes(num_bytes):
            return None
        return self._piece(exchange, min(exchange.shape[1], self._step(exchange)))

    def _finish(self, exchange: IpcExchange, shown: Tensor, offsets: Sequence[int], begin: int, end: int) -> None:
        """Carry out step 2 after the barrier, and steps 3 and 4.

        ``offsets`` lists the positions of the ranks' tensors in their parts of the segment, in bytes.
        """
        views = [view.view(shown.shape) for view in self.node.views(shown.view(-1), offsets)]
        self._events.follow(READY)  # The stream waits until the streams of all peers have filled their tensors.
        exchange.work(views, begin, end)
        self._events.record(DONE)
        self.node.barrier()
        self._events.follow(DONE)  # The stream waits until no peer reads or writes this rank's tensor.
        exchange.drain(shown, begin, end)

    def _step(self, exchange: IpcExchange) -> int:
        """Return the number of columns that fit into scratch memory."""
        return max(1, self._scratch.numel() // (exchange.shape[0] * exchange.x.itemsize))

    def _piece(self, exchange: IpcExchange, columns: int) -> Tensor:
        """Return a tensor of this number of columns at the start of scratch memory."""
        num_bytes = exchange.shape[0] * columns * exchange.x.itemsize
        return self._scratch[:num_bytes].view(exchange.x.dtype).view(-1, columns)

    def _make_room(self, num_bytes: int) -> None:
        """Enlarge scratch memory for tensors of ``num_bytes``, or less if the GPU lacks memory.

        All ranks of the channel must call it, and get scratch memory of the same size.
        """
        size_bytes = self._wanted_bytes(num_bytes)
        while self._scratch.numel() < size_bytes:
            self._scratch = self._scratch.new_empty(0)  # Free the old memory before the allocation.
            try:
                with torch.inference_mode(False):  # Later calls outside of this mode use the scratch memory too.
                    self._scratch = symmetric.memory(self._channel, size_bytes, self._device)
            except Unavailable:
                size_bytes //= 2
                if size_bytes < _LEAST_BYTES:
                    raise
                self._most_bytes = size_bytes

    def _wanted_bytes(self, num_bytes: int) -> int:
        """Return the size of scratch memory for tensors of ``num_bytes``.

        Apart from the limits, the size is a power of two, so that scratch memory seldom grows.
        """
        limit = max(_LEAST_BYTES, config.current.gpu_scratch_bytes)
        return min(limit, self._most_bytes, max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()))

    def free(self) -> None:
        """Release scratch memory and events after all GPUs have finished. All ranks of the channel must call it."""
        devices.of(self._device).synchronize()
        self._channel.mpi.Barrier()
        del self._scratch
        del self._events
