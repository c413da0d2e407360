"""Collectives within a node for tensors that are not symmetric: in the faster of two ways (``trials.py``).

*staged*  through the slots of the channel (``staging.py``): wherever the ranks share memory, and for small tensors
*direct*  by reads of the peers' tensors where they lie (``direct.py``): where the kernel allows it

Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchmpi_py.collectives.flavours import direct, staging
from torchmpi_py.collectives.flavours.node_group import Headers, NodeGroup
from torchmpi_py.collectives.reductions import Kernel


def allreduce(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, headers: Headers) -> None:
    """Every rank's ``out`` becomes the reduction of all ``x``."""
    xs, outs = headers.read_at, headers.written_at

    def staged() -> None:
        staging.allreduce(node, x, out, how)

    if xs is None or outs is None:
        staged()
    else:
        _faster(node, "allreduce", x, x.nbytes, staged, lambda: direct.allreduce(node, x, out, how, xs, outs))


def broadcast(node: NodeGroup, x: Tensor, root: int, headers: Headers) -> None:
    """Every rank's ``x`` becomes root's."""
    xs = headers.read_at

    def staged() -> None:
        staging.broadcast(node, x, root)

    if xs is None:
        staged()
    else:
        _faster(node, "broadcast", x, x.nbytes, staged, lambda: direct.broadcast(node, x, root, xs))


def gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, counts: list[int], headers: Headers | None) -> None:
    """On ranks with ``parts`` (all, or root alone) part r becomes rank r's ``x``. Small ones come without headers."""
    xs = headers and headers.read_at

    def staged() -> None:
        staging.gather(node, x, parts, counts)

    if xs is None:
        staged()
    else:
        num_bytes = sum(counts) * x.itemsize
        _faster(node, "gather", x, num_bytes, staged, lambda: direct.gather(node, x, parts, xs))


def exchange(
    node: NodeGroup, x: Tensor | None, outs: list[Tensor], how: Kernel | None, root: int | None, headers: Headers
) -> None:
    """As ``staging.exchange``; ``x`` has this rank's rows, None where it gives nothing."""
    xs, rows = headers.read_at, None if x is None else x.view(node.size, -1)

    def staged() -> None:
        staging.exchange(node, rows, outs, how, root)

    if xs is None:
        staged()
    else:
        what, num_bytes = f"exchange with {how and how.op} from {root}", node.size * outs[0].nbytes
        _faster(node, what, outs[0], num_bytes, staged, lambda: direct.exchange(node, rows, outs, how, root, xs))


def _faster(
    node: NodeGroup, what: str, x: Tensor, num_bytes: int, staged: Callable[[], None], read: Callable[[], None]
) -> None:
    """Go the way that is faster for calls of this kind and about this size; small ones fit into a chunk."""
    if node.peers is None or num_bytes <= node.chunk_bytes:
        staged()
    else:
        node.trials.run((what, x.dtype, num_bytes.bit_length()), (staged, read))
