"""Collectives within a node that read ordinary tensors directly from the memory of the peers (``peer_memory.py``).

The kernel copies each byte once, into the reader's own memory. This needs no slots, and few barriers. Reading a page in
this way costs more than reading a page of shared memory. But slots cost still more if the cores of two ranks share no
cache. Then a store into memory that the peer has read waits until the peer's cache has released it.

Before a function here is called, the ranks have exchanged the addresses of all tensors. As in ``staging.py``, each
element is reduced in rank order. No rank returns before all have read, so a call that is complete on one rank has used
the data of all.
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
"""Size of the blocks of all ranks and the result together. It exceeds a core's own cache, because a page costs less in
a long read. Blocks of a quarter of this size take 1.1 to 1.4 times as long (2 ranks, 16 and 64 MiB), and blocks of four
times this size 1.0 to 1.2 times."""


def allreduce(
    node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, addresses: tuple[Sequence[int], Sequence[int]]
) -> None:
    """Write the reduction of all ``x`` into every rank's ``out``, in two shots, as in ``two_shot.py``.

    ``addresses`` are the addresses of all ``x``, and of all ``out``, by rank.
    """
    xs, outs = addresses
    bounds = slices(x.numel(), node.size)
    lower, upper = bounds[node.rank]
    _reduce(node, x[lower:upper], out[lower:upper], how, [address + lower * x.itemsize for address in xs])
    node.barrier()  # the results of all slices are complete
    for rank in _others(node):
        lower, upper = bounds[rank]
        _peers(node).read(rank, outs[rank] + lower * x.itemsize, out[lower:upper])
    node.barrier()


def broadcast(node: NodeGroup, x: Tensor, root: int, xs: Sequence[int]) -> None:
    """Copy the ``x`` of ``root`` into the ``x`` of every rank."""
    if node.rank != root:
        _peers(node).read(root, xs[root], x)
    node.barrier()


def gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, xs: Sequence[int]) -> None:
    """Copy rank r's ``x`` into part r on ranks with ``parts`` (all ranks, or root)."""
    if parts is not None:
        copy_to(parts[node.rank], x)
        for rank in _others(node):
            _peers(node).read(rank, xs[rank], parts[rank])
    node.barrier()


def exchange(node: NodeGroup, wanted: Exchange, xs: Sequence[int]) -> None:
    """Send a row of each rank's tensor to each rank; ``xs`` are the addresses of the first rows."""
    rows, outs, how, root = wanted
    at = node.rank * outs[0].nbytes
    if how is not None:
        assert rows is not None, "all ranks have rows to reduce"
        _reduce(node, rows[node.rank], outs[0], how, [address + at for address in xs])
    elif root is not None:
        if node.rank == root:
            assert rows is not None, "the root has rows"
            copy_to(outs[0], rows[root])
        else:
            _peers(node).read(root, xs[root] + at, outs[0])
    else:
        assert rows is not None, "all ranks have rows"
        copy_to(outs[node.rank], rows[node.rank])
        for rank in _others(node):
            _peers(node).read(rank, xs[rank] + at, outs[rank])
    node.barrier()


def _reduce(node: NodeGroup, own: Tensor, out: Tensor, how: Kernel, addresses: Sequence[int]) -> None:
    """Write the reduction of ``own`` and of the elements at the ``addresses`` of the peers into ``out``."""
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
    """Return the other ranks, starting with the next one, so that not all ranks read from the same one at a time."""
    return [(node.rank + distance) % node.size for distance in range(1, node.size)]


def _peers(node: NodeGroup) -> PeerMemory:
    """Return the access to the memory of the peers."""
    assert node.peers is not None, "all ranks can read each other's memory"
    return node.peers
