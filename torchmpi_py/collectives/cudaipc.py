"""Flavour ``cudaipc``: collectives through GPU memory that the ranks of a node map, several ranks to a GPU or one.

Reductions and moves over peer views, as in flavour ``shared``, on the caller's stream (``two_shot.py``), in exchanges
(``ipc_group.py``). allreduce is done in place where the result is symmetric: each rank reduces the slice that it owns
and stores it into all peers. In the other verbs every rank reads what it needs from those who have it. On S bytes a
rank an allreduce reads S and writes S, and copies S in and out of scratch memory if its result is not symmetric.

After TorchMPI's cudaIPC collectives (reference 3.11, 3.12), rings which met on the host 2 (P-1) + 1 times and ordered
them after the local stream alone; here they meet twice, and all streams are followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from torchmpi_py import config, gpus, symmetric
from torchmpi_py.channels import Channel
from torchmpi_py.collectives import two_shot
from torchmpi_py.collectives.flavour import Flavour
from torchmpi_py.collectives.gathering import Sizes
from torchmpi_py.collectives.ipc_group import Exchange, IpcGroup
from torchmpi_py.collectives.reductions import Kernel, kernel
from torchmpi_py.communicators import Communicator


class CudaIpc(Flavour):
    """GPU memory mapped by peers."""

    name = "cudaipc"
    meets_first = True

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = frozenset(devices)  # type: ignore[misc]  # tests carry it out on the host

    def missing(self, device: str) -> str:
        return symmetric.why_unavailable() or (gpus.why_no_ipc() if device == "cuda" else "")

    def refuses(self, comm: Communicator | Channel) -> str:
        if comm.num_nodes > 1:
            return f"the communicator spreads over {comm.num_nodes} nodes"
        places = comm.places if isinstance(comm, Channel) else comm.direct.places
        return "" if gpus.table() is None else gpus.why_no_ipc(places)

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        group, how = _group(channel, source), kernel(source.dtype, op)
        x, out = source.view(1, -1), destination.view(1, -1)

        def work(views: Sequence[Tensor], begin: int, end: int) -> None:
            lines = [view.view(-1) for view in views]
            two_shot.carry_out(two_shot.allreduce(lines, lines, group.rank, config.current.gpu_cache_bytes), how)

        group.run(
            Exchange(
                f"allreduce with {op}",
                x,
                x.numel(),
                1,
                x.numel(),
                work,
                home=out,
                fill=lambda shown, begin, end: _copy(shown, x[:, begin:end]),
                drain=lambda shown, begin, end: _copy(out[:, begin:end], shown),
            )
        )

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        group, how, out = _group(channel, source), kernel(source.dtype, op), destination.view(-1)

        def work(views: Sequence[Tensor], begin: int, end: int) -> None:
            if group.rank == root:
                _reduce([view.view(-1) for view in views], out[begin:end], how)

        group.run(_showing(f"reduce with {op} to root {root}", source.view(1, -1), work))

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        group, how, out = _group(channel, source), kernel(source.dtype, op), destination.view(-1)

        def work(views: Sequence[Tensor], begin: int, end: int) -> None:
            _reduce([view[group.rank] for view in views], out[begin:end], how)

        group.run(_showing(f"reduce_scatter with {op}", source.view(channel.size, -1), work))

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        group, x = _group(channel, x), x.view(1, -1)

        def work(views: Sequence[Tensor], begin: int, end: int) -> None:
            if group.rank != root:
                x[:, begin:end].copy_(views[root])

        group.run(_showing(f"broadcast from root {root}", x, work, shows=group.rank == root))

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        group, out = _group(channel, source), destination.view(-1)

        def work(views: Sequence[Tensor], begin: int, end: int) -> None:
            out[begin:end].copy_(views[root][group.rank])

        x = source.view(channel.size, -1)
        group.run(_showing(f"scatter from root {root}", x, work, shows=group.rank == root))

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        group, out = _group(channel, source), destination.view(channel.size, -1)

        def work(views: Sequence[Tensor], begin: int, end: int) -> None:
            for row, view in zip(out, views, strict=True):
                row[begin:end].copy_(view[group.rank])

        group.run(_showing("alltoall", source.view(channel.size, -1), work))

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        _gather(_group(channel, x), x, list(sizes.split(out)), sizes)

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        _gather(_group(channel, x), x, [] if out is None else list(sizes.split(out)), sizes)


def _reduce(sources: Sequence[Tensor], out: Tensor, how: Kernel) -> None:
    """Reduce flat tensors of all ranks into one of this rank's own."""
    two_shot.carry_out(two_shot.plan(sources, [out], (0, out.numel()), config.current.gpu_cache_bytes), how)


def _gather(group: IpcGroup, x: Tensor, parts: Sequence[Tensor], sizes: Sizes) -> None:
    """Each rank shows what it brings, of its own size, and those with ``parts`` read all of them."""
    x, lines = x.view(-1), [part.view(-1) for part in parts]
    counts = [num_bytes // x.itemsize for num_bytes in sizes.num_bytes]

    def fill(shown: Tensor, begin: int, end: int) -> None:
        mine = x[begin:end]
        shown[0, : mine.numel()].copy_(mine)

    def work(views: Sequence[Tensor], begin: int, end: int) -> None:
        for line, view in zip(lines, views, strict=False):
            piece = line[begin:end]
            piece.copy_(view[0, : piece.numel()])

    group.run(Exchange("gather", x, sum(counts), 1, max(counts), work, fill=fill))


def _showing(what: str, x: Tensor, work: object, *, shows: bool = True) -> Exchange:
    """The exchange in which ranks only read; those that do not show anything have nothing to copy."""
    exchange = Exchange(what, x, x.numel(), x.shape[0], x.shape[1], work, home=x)  # type: ignore[arg-type]
    if shows:
        exchange.fill = lambda shown, begin, end: _copy(shown, x[:, begin:end])
    return exchange


def _copy(destination: Tensor, source: Tensor) -> None:
    """Unless they are the same memory."""
    if destination.data_ptr() != source.data_ptr():
        destination.copy_(source)


def _group(channel: Channel, x: Tensor) -> IpcGroup:
    return channel.keep((IpcGroup, x.device), lambda made: IpcGroup(made, x.device))
