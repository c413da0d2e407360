"""Collectives within a node that read ordinary tensors directly from the peers' memory (``peer_memory.py``).

The kernel copies each byte once, into the memory of the rank that reads. This method needs no slots and few barriers.

Alternative: slots in shared memory (``staging.py``). A page of shared memory is faster to read than a page of another
process. But slots are slower overall if the cores of two ranks share no cache. In this case a store into memory that
the peer has read must wait until the peer's cache has released it.

Before each call the ranks must have exchanged the addresses of all tensors. As in ``staging.py``, each element is
reduced in rank order. No rank returns before all ranks have read the data that they need. So a call that is complete on
one rank has used the data of all ranks.
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
"""Total size of the blocks of all ranks and of the result.

It exceeds the cache of a core, because long reads cost less per page. An allreduce takes 1.1 to 1.4 times as long with
blocks of a quarter of this size, and 1.0 to 1.2 times as long with blocks of four times this size (2 ranks, 16 and
64 MiB).
"""


def allreduce(
    node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, addresses: tuple[Sequence[int], Sequence[int]]
) -> None:
    """Write the reduction of all ``x`` into every rank's ``out``, in two shots as in ``two_shot.py``.

    ``addresses`` contains the addresses of ``x`` by rank, and the addresses of ``out`` by rank.
    """
    xs, outs = addresses
    bounds = slices(x.numel(), node.size)
    lower, upper = bounds[node.rank]
    _reduce(node, x[lower:upper], out[lower:upper], how, [address + lower * x.itemsize for address in xs])
    node.barrier()  # Now the results of all slices are complete.
    for rank in _others(node):
        lower, upper = bounds[rank]
        _peers(node).read(rank, outs[rank] + lower * x.itemsize, out[lower:upper])
    node.barrier()


def broadcast(node: NodeGroup, x: Tensor, root: int, xs: Sequence[int]) -> None:
    """Copy the ``x`` of ``root`` into the ``x`` of every rank; ``xs`` are the addresses of ``x`` by rank."""
    if node.rank != root:
        _peers(node).read(root, xs[root], x)
    node.barrier()


def gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, xs: Sequence[int]) -> None:
    """Copy rank r's ``x``, at address ``xs[r]``, into ``parts[r]`` on ranks with ``parts`` (all ranks, or root)."""
    if parts is not None:
        copy_to(parts[node.rank], x)
        for rank in _others(node):
            _peers(node).read(rank, xs[rank], parts[rank])
    node.barrier()


def exchange(node: NodeGroup, wanted: Exchange, xs: Sequence[int]) -> None:
    """Carry out an ``Exchange``; ``xs`` are the addresses of the ranks' ``rows``."""
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
    """Reduce ``own`` and the peers' elements into ``out``; ``addresses`` are the addresses of the elements by rank."""
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
    """Return the other ranks, starting with the next rank, so that not all ranks read from one rank at a time."""
    return [(node.rank + distance) % node.size for distance in range(1, node.size)]


def _peers(node: NodeGroup) -> PeerMemory:
    """Return the object that reads the peers' memory."""
    assert node.peers is not None, "all ranks can read each other's memory"
    return node.peers
