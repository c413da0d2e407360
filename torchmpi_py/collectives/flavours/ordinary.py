"""Collectives within a node for tensors that are not symmetric, by the faster of two methods (``trials.py``).

- *staged*: through the slots of the channel (``staging.py``). This method is always possible. Tensors that fit into a
  chunk always use it.
- *single copy*: each rank reads its peers' tensors directly (``single_copy.py``), if the kernel allows such reads.

Both methods produce the same bits. Most allreduces of two ranks use ``staging.allreduce_at_once`` instead of this
module, if the tensors fit into two slots.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from torchmpi_py.collectives.flavours import single_copy, staging
from torchmpi_py.collectives.flavours.node_group import Exchange, Headers, NodeGroup
from torchmpi_py.collectives.reductions import Kernel


def allreduce(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, headers: Headers) -> None:
    """Write the reduction of all ``x`` into every rank's ``out``."""
    ways, xs, outs = [partial(staging.allreduce, node, x, out, how)], headers.read_at, headers.written_at
    if xs is not None and outs is not None:
        ways.append(partial(single_copy.allreduce, node, x, out, how, (xs, outs)))
    _go(node, ("allreduce", x.dtype), x.nbytes, ways)


def broadcast(node: NodeGroup, x: Tensor, root: int, headers: Headers) -> None:
    """Copy the ``x`` of ``root`` into the ``x`` of every rank."""
    ways = [partial(staging.broadcast, node, x, root)]
    if headers.read_at is not None:
        ways.append(partial(single_copy.broadcast, node, x, root, headers.read_at))
    _go(node, ("broadcast",), x.nbytes, ways)


def gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, counts: list[int], headers: Headers) -> None:
    """Copy rank r's ``x``, of ``counts[r]`` elements, into ``parts[r]`` on all ranks, or only on root.

    Other ranks pass None for ``parts``.
    """
    ways = [partial(staging.gather, node, x, parts, counts)]
    if headers.read_at is not None:
        ways.append(partial(single_copy.gather, node, x, parts, headers.read_at))
    _go(node, ("gather",), sum(counts) * x.itemsize, ways)


def exchange(node: NodeGroup, wanted: Exchange, headers: Headers) -> None:
    """Carry out an ``Exchange``: send one row from each rank to each rank."""
    ways = [partial(staging.exchange, node, wanted)]
    if headers.read_at is not None:
        ways.append(partial(single_copy.exchange, node, wanted, headers.read_at))
    out = wanted.outs[0]
    _go(node, ("exchange", out.dtype, wanted.how is None, wanted.root is None), node.size * out.nbytes, ways)


def _go(node: NodeGroup, kind: tuple[object, ...], num_bytes: int, ways: list[partial[None]]) -> None:
    """Carry out a call by the method that trials found to be the fastest for this kind of call and this size.

    Without an alternative, use the only method.
    """
    if len(ways) == 1:
        ways[0]()
    else:
        node.trials.run((*kind, num_bytes.bit_length()), num_bytes, ways)
