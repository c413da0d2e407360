"""Collectives within a node for tensors that are not symmetric: in the faster of two ways (``trials.py``).

*staged*       through the slots of the channel (``staging.py``): always, and alone for what fits into a chunk
               (in an allreduce of two ranks: into two slots, and does not come here)
*single copy*  by reads of the peers' tensors where they lie (``single_copy.py``): where the kernel allows it

Both give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from torchmpi_py.collectives.flavours import single_copy, staging
from torchmpi_py.collectives.flavours.node_group import Headers, NodeGroup
from torchmpi_py.collectives.reductions import Kernel

At = TypeVar("At")


def allreduce(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, headers: Headers) -> None:
    """Every rank's ``out`` becomes the reduction of all ``x``."""
    xs, outs = headers.read_at, headers.written_at

    def copy_once(at: tuple[list[int], list[int]]) -> None:
        single_copy.allreduce(node, x, out, how, *at)

    both = None if xs is None or outs is None else (xs, outs)
    kind = ("allreduce", x.dtype)
    _faster(node, kind, x.nbytes, lambda: staging.allreduce(node, x, out, how), both, copy_once)


def broadcast(node: NodeGroup, x: Tensor, root: int, headers: Headers) -> None:
    """Every rank's ``x`` becomes root's."""

    def copy_once(at: list[int]) -> None:
        single_copy.broadcast(node, x, root, at)

    _faster(node, ("broadcast",), x.nbytes, lambda: staging.broadcast(node, x, root), headers.read_at, copy_once)


def gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, counts: list[int], headers: Headers) -> None:
    """On ranks with ``parts`` (all, or root alone) part r becomes rank r's ``x``."""

    def copy_once(at: list[int]) -> None:
        single_copy.gather(node, x, parts, at)

    num_bytes = sum(counts) * x.itemsize
    _faster(node, ("gather",), num_bytes, lambda: staging.gather(node, x, parts, counts), headers.read_at, copy_once)


def exchange(
    node: NodeGroup, x: Tensor | None, outs: list[Tensor], how: Kernel | None, root: int | None, headers: Headers
) -> None:
    """As ``staging.exchange``; ``x`` has this rank's rows, None where it gives nothing."""
    rows = None if x is None else x.view(node.size, -1)

    def copy_once(at: list[int]) -> None:
        single_copy.exchange(node, rows, outs, how, root, at)

    kind, num_bytes = ("exchange", outs[0].dtype, how is None, root is None), node.size * outs[0].nbytes
    staged = functools.partial(staging.exchange, node, rows, outs, how, root)
    _faster(node, kind, num_bytes, staged, headers.read_at, copy_once)


def _faster(
    node: NodeGroup,
    kind: tuple[object, ...],
    num_bytes: int,
    staged: Callable[[], None],
    at: At | None,
    copy_once: Callable[[At], None],
) -> None:
    """Go the way that is faster for calls of this kind and about this size; ``at``: where the tensors lie, if known."""
    if at is None:
        staged()
    else:
        node.trials.run((*kind, num_bytes.bit_length()), num_bytes, (staged, functools.partial(copy_once, at)))
