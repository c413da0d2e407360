"""Flavour ``shared``: collectives through memory that all ranks of a node map.

On symmetric tensors the ranks work in place: they reduce as in ``two_shot.py``, and in the other collectives each rank
reads directly from its peers' tensors. Other tensors are copied through the slots of the channel, or the kernel copies
them from one rank's memory into another rank's memory (``ordinary.py``). The ranks' headers determine which case
applies (``node_group.py``). If the results of an allreduce are symmetric but its inputs are not, each rank first copies
the slices of its input that its peers own into its result. Any other mixture is treated as ordinary tensors.

Alternative: flavour ``mpi``, which also uses shared memory within a node. The selector uses it for small tensors. For
large tensors this flavour is faster, because it works in place, or copies each byte fewer times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchmpi_py.collectives.flavour import Flavour, Sizes
from torchmpi_py.collectives.flavours import ordinary, prepared_allreduce, staging, trials, two_shot
from torchmpi_py.collectives.flavours.node_group import Exchange, NodeGroup
from torchmpi_py.collectives.plan import Plan, Post
from torchmpi_py.collectives.reductions import kernel
from torchmpi_py.core import config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.tensors import copy_to
from torchmpi_py.memory import symmetric


class Shared(Flavour):
    """Collectives through shared memory within a node."""

    name = "shared"
    exchanges_headers = True
    num_trial_calls = trials.num_calls()
    scatters_in_place = True
    devices = frozenset({"cpu"})

    def missing(self, device: str) -> str:
        return symmetric.unavailable_because

    def refuses(self, channel: Channel) -> str:
        return "" if channel.num_nodes == 1 else f"the ranks span {channel.num_nodes} nodes; shared works on one node"

    def bind(self, plan: Plan) -> tuple[Callable[..., Any], Post | None]:
        work, post = super().bind(plan)
        if plan.method != "allreduce":
            return work, post

        # All ranks must create the node group together. So the first call creates it, not ``bind``.
        def first(source: Tensor, destination: Tensor) -> None:
            node = _node(plan.comm.direct)
            plan.work = prepared_allreduce.of(node, destination, *plan.others).run
            plan.work(source, destination)

        return first, post

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        prepared_allreduce.of(_node(channel), destination, op).run(source, destination)

    def allreduce_adopting(self, channel: Channel, x: Tensor, op: str) -> None:
        """Carry out an in-place allreduce of a tensor that is used repeatedly, and whose memory the package may move.

        If all ranks make this call, and no rank's tensor has been moved before, the ranks first move their tensors into
        files that all of them map (``symmetric.adopt``).
        """
        prepared_allreduce.of(_node(channel), x, op).run_adopting(x.view(-1))

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        node, x, out = _node(channel), source.view(-1), destination.view(-1)
        how = kernel(x.dtype, op)
        headers = node.exchange_headers(f"reduce with {op} to root {root}", x, out)
        if headers.read is None or headers.written is None:
            staging.allreduce(node, x, out, how, root)
        else:
            target = node.views(out, headers.written)[root]
            steps = two_shot.reduce(node.views(x, headers.read), target, node.rank, config.current.cache_bytes)
            two_shot.carry_out(steps, how)
            node.barrier()

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        node, x, out = _node(channel), source.view(-1), destination.view(-1)
        how = kernel(x.dtype, op)
        headers = node.exchange_headers(f"reduce_scatter with {op}", x)
        if headers.read is None:
            ordinary.exchange(node, Exchange(x.view(node.size, -1), [out], how), headers)
        else:
            steps = two_shot.reduce_scatter(node.views(x, headers.read), out, node.rank, config.current.cache_bytes)
            two_shot.carry_out(steps, how)
            node.barrier()

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        node, x = _node(channel), x.view(-1)
        headers = node.exchange_headers(f"broadcast from root {root}", x)
        if headers.read is None:
            ordinary.broadcast(node, x, root, headers)
        else:
            if node.rank != root:
                x.copy_(node.views(x, headers.read)[root])
            node.barrier()

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        _gather(_node(channel), x, list(sizes.split(out)), sizes)

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        _gather(_node(channel), x, None if out is None else list(sizes.split(out)), sizes)

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        node, x, out = _node(channel), source.view(-1), destination.view(channel.size, -1)
        headers = node.exchange_headers("alltoall", x)
        if headers.read is None:
            ordinary.exchange(node, Exchange(x.view(node.size, -1), list(out)), headers)
        else:
            for row, theirs in zip(out, node.views(x, headers.read), strict=True):
                row.copy_(theirs.view(node.size, -1)[node.rank])
            node.barrier()

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        node, x, out = _node(channel), source.view(-1), destination.view(-1)
        headers = node.exchange_headers(f"scatter from root {root}", x)
        if headers.read is None:
            rows = x.view(node.size, -1) if node.rank == root else None
            ordinary.exchange(node, Exchange(rows, [out], root=root), headers)
        else:
            out.copy_(node.views(x, headers.read)[root].view(node.size, -1)[node.rank])
            node.barrier()


def _gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, sizes: Sizes) -> None:
    """Copy rank r's ``x`` into ``parts[r]`` on every rank that passes ``parts``."""
    x = x.view(-1)
    counts = [num_bytes // x.itemsize for num_bytes in sizes.num_bytes]
    flat = None if parts is None else [part.view(-1) for part in parts]
    headers = node.exchange_headers("a gather", x, count=sum(counts))
    if headers.read is None:
        ordinary.gather(node, x, flat, counts, headers)
        return
    if flat is not None:
        for part, view in zip(flat, node.views(x, headers.read, counts), strict=True):
            copy_to(part, view)
    node.barrier()


def _node(channel: Channel) -> NodeGroup:
    """Return the node group of a channel. All ranks of the channel must make the first call together."""
    return channel.keep(NodeGroup, NodeGroup)
