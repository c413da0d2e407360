"""Flavour ``shared``: collectives through memory that all ranks of a node map.

Symmetric tensors are worked on in place (``two_shot.py``); data that is only moved is read straight from the rank that
has it. Other tensors go through the staging slots of the channel, or the kernel copies them from one rank's memory into
another's (``ordinary.py``). The headers of the ranks say which case it is (``node_group.py``). Where the results of an
allreduce are symmetric and its inputs are not, ranks publish in their results the slices of their inputs that others
own; any other mixture is treated as ordinary tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmpi_py.collectives.flavour import Flavour, Sizes
from torchmpi_py.collectives.flavours import ordinary, staging, trials, two_shot
from torchmpi_py.collectives.flavours.node_group import Headers, NodeGroup, Prepared
from torchmpi_py.collectives.reductions import Kernel, kernel
from torchmpi_py.core import config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.tensors import copy_to
from torchmpi_py.memory import symmetric


class Shared(Flavour):
    """Shared memory within a node."""

    name = "shared"
    exchanges_headers = True
    num_trial_calls = trials.num_calls()
    scatters_in_place = True
    devices = frozenset({"cpu"})

    def missing(self, device: str) -> str:
        return symmetric.why_unavailable()

    def refuses(self, comm: Communicator | Channel) -> str:
        return "" if comm.num_nodes == 1 else f"the communicator spreads over {comm.num_nodes} nodes"

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        node, how, what = _node(channel), kernel(source.dtype, op), f"allreduce with {op}"
        if source is destination or source.data_ptr() == destination.data_ptr():
            _allreduce_in_place(node, destination if destination.dim() == 1 else destination.view(-1), how, what)
            return
        _begin_allreduce(node, source.view(-1), destination.view(-1), how, what)

    def allreduce_adopting(self, channel: Channel, x: Tensor, op: str) -> None:
        """``allreduce`` in place of a tensor that comes again, and whose memory is the package's to move.

        If all ranks make this call, and no rank's tensor has moved before, they move their tensors to where all of them
        map these (``symmetric.adopt``).
        """
        node, x, how, what = _node(channel), x.view(-1), kernel(x.dtype, op), f"allreduce with {op}"
        if node.can_adopt and symmetric.find(x) is None:
            node.announce(node.adoptable_header(what, x))
            headers = node.read_headers(what, x)
            if not headers.are_adoptable:
                _allreduce(node, x, x, how, headers)
                return
            node.can_adopt = symmetric.adopt(channel, x)  # in which all ranks meet: they have read the headers
            node.drop_dead_plans()
        _allreduce_in_place(node, x, how, what)

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
            ordinary.exchange(node, x, [out], how, None, headers)
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
            ordinary.exchange(node, x, list(out), None, None, headers)
        else:
            for row, theirs in zip(out, node.views(x, headers.read), strict=True):
                row.copy_(theirs.view(node.size, -1)[node.rank])
            node.barrier()

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        node, x, out = _node(channel), source.view(-1), destination.view(-1)
        headers = node.exchange_headers(f"scatter from root {root}", x)
        if headers.read is None:
            ordinary.exchange(node, x if node.rank == root else None, [out], None, root, headers)
        else:
            out.copy_(node.views(x, headers.read)[root].view(node.size, -1)[node.rank])
            node.barrier()


def _begin_allreduce(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, what: str) -> None:
    """Allreduce of ``x``, which may be ``out``, while no rank knows where the others' tensors lie."""
    fits = x.nbytes <= 2 * node.chunk_bytes and staging.takes_one_shot(node, how)
    if not fits or symmetric.find(x) is not None or (out is not x and symmetric.find(out) is not None):
        _allreduce(node, x, out, how, node.exchange_headers(what, x, out))
    elif staging.allreduce_at_once(node, x, out, how, what):
        node.barrier()
    else:
        _allreduce(node, x, out, how, node.read_headers(what, x))


def _allreduce(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, headers: Headers) -> None:
    """Allreduce in the best way for where the tensors lie; ``x`` may be ``out`` on this rank alone."""
    if headers.written is None:
        ordinary.allreduce(node, x, out, how, headers)
        return
    # In place: the results are symmetric. Where the inputs are not, each rank publishes them in its result first.
    destinations = node.views(out, headers.written)
    if headers.read is not None:
        sources = node.views(x, headers.read)
    else:
        two_shot.publish(x, out, node.rank, node.size)
        sources = [x if rank == node.rank else view for rank, view in enumerate(destinations)]
        node.barrier()
    two_shot.carry_out(two_shot.allreduce(sources, destinations, node.rank, config.current.cache_bytes), how)
    node.barrier()


def _allreduce_in_place(node: NodeGroup, x: Tensor, how: Kernel, what: str) -> None:
    """The hot path, which buckets take at every step: the plan of the last call with this tensor is used again."""
    key = (what, x.dtype, x.data_ptr(), x.numel())
    ready = node.prepared.get(key)
    if ready is None or not symmetric.is_live(ready.segment):
        ready = _prepare(node, x, what)
        if ready is not None:
            node.keep_prepared(key, ready)
    if ready is None:
        _begin_allreduce(node, x, x, how, what)
    elif node.announce(ready.header):  # equal headers: all tensors lie at the same offset, as planned
        two_shot.carry_out(ready.work, how)
        node.barrier()
    else:
        _allreduce(node, x, x, how, node.read_headers(what, x))


def _prepare(node: NodeGroup, x: Tensor, what: str) -> Prepared | None:
    """The plan for a tensor that is symmetric here, if the others' tensors lie at the same offset of their parts."""
    found = symmetric.find(x)
    if found is None or not node.is_within(found[0]):
        return None
    with torch.inference_mode(False):  # the plan is kept, for calls outside of that mode too
        views = node.views(x, [found[1]] * node.size)
    steps = two_shot.allreduce(views, views, node.rank, config.current.cache_bytes)
    return Prepared(found[0], node.header(what, x), steps)


def _gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, sizes: Sizes) -> None:
    x = x.view(-1)
    counts = [num_bytes // x.itemsize for num_bytes in sizes.num_bytes]
    flat = None if parts is None else [part.view(-1) for part in parts]
    headers = None
    if sum(sizes.num_bytes) > node.chunk_bytes:  # smaller ones are copied in less time than headers take
        headers = node.exchange_headers("a gather", x, count=sum(counts))
    if headers is None or headers.read is None:
        ordinary.gather(node, x, flat, counts, headers)
        return
    if flat is not None:
        for part, view in zip(flat, node.views(x, headers.read, counts), strict=True):
            copy_to(part, view)
    node.barrier()


def _node(channel: Channel) -> NodeGroup:
    return channel.keep(NodeGroup, NodeGroup)
