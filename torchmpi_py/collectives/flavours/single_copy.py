"""Collectives within a node that read ordinary tensors where they lie: in the memory of the peers (``peer_memory.py``).

Each byte is copied once, by the kernel, into the reader's own memory: no slots, and few meetings. A page costs more
than a page of shared memory does. But where the cores of two ranks share no cache, slots cost still more: a store into
memory that the peer has read waits until the peer's cache has given it up.

The ranks have met, with the addresses of all tensors. As in ``staging.py`` each element is reduced in rank order. No
rank leaves before all have read: a call that is complete on one rank has had the data of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmpi_py.collectives.flavours.node_group import Exchange, NodeGroup
from torchmpi_py.collectives.flavours.schedule import ALIGNMENT, chunks, slices
from torchmpi_py.collectives.reductions import Kernel
from torchmpi_py.core.tensors import copy_to
from torchmpi_py.memory.peer_memory import PeerMemory

_BLOCK_BYTES = 6 << 20
"""Of the blocks of all ranks and the result together. More than fits into a core's own cache, for a page costs less in
a long read: with a quarter 1.1 to 1.4 times as long (2 ranks, 16 and 64 MiB), with four times as much 1.0 to 1.2."""


def allreduce(
    node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, addresses: tuple[Sequence[int], Sequence[int]]
) -> None:
    """Every rank's ``out`` becomes the reduction of all ``x``: two shots, as in ``two_shot.py``.

    ``addresses``: of all ``x``, and of all ``out``, by rank.
    """
    xs, outs = addresses
    bounds = slices(x.numel(), node.size)
    lower, upper = bounds[node.rank]
    _reduce(node, x[lower:upper], out[lower:upper], how, [address + lower * x.itemsize for address in xs])
    node.barrier()  # the results of all slices are there
    for rank in _others(node):
        lower, upper = bounds[rank]
        _peers(node).read(rank, outs[rank] + lower * x.itemsize, out[lower:upper])
    node.barrier()


def broadcast(node: NodeGroup, x: Tensor, root: int, xs: Sequence[int]) -> None:
    """Every rank's ``x`` becomes root's."""
    if node.rank != root:
        _peers(node).read(root, xs[root], x)
    node.barrier()


def gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, xs: Sequence[int]) -> None:
    """On ranks with ``parts`` (all, or root alone) part r becomes rank r's ``x``."""
    if parts is not None:
        copy_to(parts[node.rank], x)
        for rank in _others(node):
            _peers(node).read(rank, xs[rank], parts[rank])
    node.barrier()


def exchange(node: NodeGroup, wanted: Exchange, xs: Sequence[int]) -> None:
    """Each rank gives a row of its tensor to each rank; ``xs``: where the rows begin."""
    rows, outs, how, root = wanted
    at = node.rank * outs[0].nbytes
    if how is not None:
        assert rows is not None, "all ranks give what is reduced"
        _reduce(node, rows[node.rank], outs[0], how, [address + at for address in xs])
    elif root is not None:
        if node.rank == root:
            assert rows is not None, "the root gives"
            copy_to(outs[0], rows[root])
        else:
            _peers(node).read(root, xs[root] + at, outs[0])
    else:
        assert rows is not None, "all ranks give"
        copy_to(outs[node.rank], rows[node.rank])
        for rank in _others(node):
            _peers(node).read(rank, xs[rank] + at, outs[rank])
    node.barrier()


def _reduce(node: NodeGroup, own: Tensor, out: Tensor, how: Kernel, addresses: Sequence[int]) -> None:
    """``out`` becomes the reduction of ``own`` and, of the peers, as many elements at ``addresses``."""
    step = max(1024, _BLOCK_BYTES // ((node.size + 1) * own.itemsize) // ALIGNMENT * ALIGNMENT)
    blocks = torch.empty(node.size - 1, min(step, own.numel()), dtype=own.dtype, device="cpu")
    others = _others(node)
    for begin, end in chunks(0, own.numel(), step):
        sources = {rank: block[: end - begin] for rank, block in zip(others, blocks, strict=True)}
        for rank, block in sources.items():
            _peers(node).read(rank, addresses[rank] + begin * own.itemsize, block)
        sources[node.rank] = own[begin:end]
        how.reduce([sources[rank] for rank in range(node.size)], out[begin:end])


def _others(node: NodeGroup) -> list[int]:
    """The other ranks, from the next one on, so that not all read the same one at a time."""
    return [(node.rank + distance) % node.size for distance in range(1, node.size)]


def _peers(node: NodeGroup) -> PeerMemory:
    assert node.peers is not None, "all ranks can read each other's memory"
    return node.peers
