"""Collectives that autograd follows: a network may pass its activations through them.

Each function takes the arguments of the verb of its name but for ``out`` and ``flavour``, leaves ``x`` as it is, and
returns a new tensor. Each is a linear map of what all P ranks bring, and its backward pass is the adjoint map. With
x_r and y_r the input and result of rank r, and L the *sum of the losses of all ranks*, a rank's gradients are::

    dx_r = dL / dx_r      dy_r = dL / dy_r

So where every rank has the same loss after an ``allreduce``, the gradients are P times those of one loss: divide the
loss, or take ``op="avg"``. Only ops sum and avg are linear.

- Every rank of ``comm`` (default: the current level) calls the same functions in the same order, forward and backward:
  every rank takes part in the backward pass of every function whose result some rank's loss depends on. Where the
  result is only on root, the other ranks get a tensor of zeros, or of no rows; add its sum to their loss. Where
  inputs are named (``torch.autograd.grad``), all ranks name such as are reached through the same functions. Of tensors
  on several devices in one graph autograd keeps no order: give each device a communicator of its own.
- Gradients flow if ``x`` requires them on any rank, which the ranks find out by a reduction of a number. Whether
  gradients are enabled (``torch.no_grad``) is alike on all ranks.
- Derivatives of derivatives are taken in the same way if ``x`` requires a gradient on all ranks; else RanksDisagree.
- Other collectives may be under way in the backward pass: these functions use a communicator of their own.

TypeError and ValueError as from the verbs, before anything is sent; RanksDisagree and CommunicatorError as from these.

Source: the adjoints follow from the verbs' definitions; torch.distributed.nn.functional has some of them, ChainerMN
had them for networks that are split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from torchmpi_py.collectives import verbs
from torchmpi_py.core import communicators, compiling
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.tensors import NO_TRANSFORM, check_divisible, check_rank, check_tensor
from torchmpi_py.errors import RanksDisagree

LINEAR_OPS = ("sum", "avg")

_Map = Callable[[Tensor], Tensor]


def own_communicator(comm: Communicator | None) -> Communicator:
    """The duplicate of ``comm`` for layers: gradients use ``comm`` during the backward pass. Collective once."""
    return communicators.beside(communicators.resolve(comm), "layers")


def allreduce(x: Tensor, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """The sum (or average) of the ``x`` of all ranks, on all ranks: y_s = sum_r x_r.

    Adjoint: dx_r = sum_s dy_s, an allreduce; with "avg" both are divided by P.
    """
    _check_op("allreduce", op)
    return _allreduce(x, op, _checked("allreduce", x, comm))


def _allreduce(x: Tensor, op: str, comm: Communicator) -> Tensor:
    def to_all(x: Tensor) -> Tensor:
        return verbs.allreduce(x, out=torch.empty_like(x), op=op, comm=comm)

    return _apply(x, comm, to_all, lambda dy: _allreduce(dy, op, comm))


def broadcast(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """The ``x`` of ``root``, on all ranks: y_s = x_root. The others' ``x`` has the same shape and dtype.

    Adjoint: dx_root = sum_s dy_s, a reduce; zero on the other ranks.
    """
    return _broadcast(x, root, _checked("broadcast", x, comm, root=root))


def _broadcast(x: Tensor, root: int, comm: Communicator) -> Tensor:
    def from_root(x: Tensor) -> Tensor:
        return verbs.broadcast(x.clone(), root, comm=comm)

    return _apply(x, comm, from_root, lambda dy: _reduce(dy, root, "sum", comm))


def reduce(x: Tensor, root: int = 0, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """The sum (or average) of the ``x`` of all ranks, on ``root``: y_root = sum_r x_r. Zeros on the others.

    Adjoint: dx_r = dy_root, a broadcast; with "avg" both are divided by P.
    """
    _check_op("reduce", op)
    return _reduce(x, root, op, _checked("reduce", x, comm, root=root))


def _reduce(x: Tensor, root: int, op: str, comm: Communicator) -> Tensor:
    def on_root(x: Tensor) -> Tensor:
        return verbs.reduce(x, root, out=torch.zeros_like(x), op=op, comm=comm)  # not written on the others

    def to_all(dy: Tensor) -> Tensor:
        dx = _broadcast(dy, root, comm)
        return dx / comm.size if op == "avg" else dx

    return _apply(x, comm, on_root, to_all)


def reduce_scatter(x: Tensor, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """The sum (or average) of the ``x`` of all ranks, slice r of it on rank r: y_r = sum_s x_s[slice r].

    There are P equal slices along dim 0. Adjoint: dx_s = (dy_0, dy_1, ...), an allgather; with "avg" both are divided
    by P.
    """
    _check_op("reduce_scatter", op)
    return _reduce_scatter(x, op, _checked("reduce_scatter", x, comm, splits=True))


def _reduce_scatter(x: Tensor, op: str, comm: Communicator) -> Tensor:
    def to_all(dy: Tensor) -> Tensor:
        dx = _allgather(dy, [dy.shape[0]] * comm.size, comm)
        return dx / comm.size if op == "avg" else dx

    return _apply(x, comm, lambda x: verbs.reduce_scatter(x, op=op, comm=comm), to_all)


def allgather(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """The ``x`` of all ranks, concatenated along dim 0 in rank order, on all ranks; their dim-0 sizes may differ.

    Adjoint: dx_r = sum_s dy_s[rows of rank r], a reduce_scatter where all bring as many rows, else an allreduce.
    """
    comm = _checked("allgather", x, comm)
    return _allgather(_rows(x), _all_counts(x, comm), comm)


def _allgather(x: Tensor, counts: list[int], comm: Communicator) -> Tensor:
    def shares(dy: Tensor) -> Tensor:
        if len(set(counts)) == 1:
            return _reduce_scatter(dy, "sum", comm)
        return _share(_allreduce(dy, "sum", comm), counts, comm)

    return _apply(x, comm, lambda x: verbs.allgather(x, comm=comm), shares)


def gather(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """The ``x`` of all ranks, concatenated along dim 0 in rank order, on ``root``; no rows on the other ranks.

    Their dim-0 sizes may differ. Adjoint: dx_r = dy_root[rows of rank r], a scatter where all bring as many rows, else
    a broadcast.
    """
    comm = _checked("gather", x, comm, root=root)
    return _gather(_rows(x), root, _all_counts(x, comm), comm)


def _gather(x: Tensor, root: int, counts: list[int], comm: Communicator) -> Tensor:
    def on_root(x: Tensor) -> Tensor:
        whole = verbs.gather(x, root, comm=comm)
        return x.new_empty((0, *x.shape[1:])) if whole is None else whole

    def shares(dy: Tensor) -> Tensor:
        whole = _filled(dy, sum(counts))
        if len(set(counts)) == 1:
            return _scatter(whole, root, comm)
        return _share(_broadcast(whole, root, comm), counts, comm)

    return _apply(x, comm, on_root, shares)


def scatter(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """Slice r, of P equal slices along dim 0, of root's ``x``, on rank r: y_r = x_root[slice r].

    The others' ``x`` has the same shape and dtype. Adjoint: dx_root = (dy_0, dy_1, ...), a gather; zero on the others.
    """
    return _scatter(x, root, _checked("scatter", x, comm, splits=True, root=root))


def _scatter(x: Tensor, root: int, comm: Communicator) -> Tensor:
    def on_root(dy: Tensor) -> Tensor:
        counts = [dy.shape[0]] * comm.size
        return _filled(_gather(dy, root, counts, comm), sum(counts))

    return _apply(x, comm, lambda x: verbs.scatter(x, root, comm=comm), on_root)


def alltoall(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """Slice s of the result is this rank's slice of rank s's ``x``, of P equal slices along dim 0: y_r[s] = x_s[r].

    Adjoint: dx_s[r] = dy_r[s], an alltoall.
    """
    return _alltoall(x, _checked("alltoall", x, comm, splits=True))


def _alltoall(x: Tensor, comm: Communicator) -> Tensor:
    def exchanged(x: Tensor) -> Tensor:
        return verbs.alltoall(x, out=torch.empty_like(x), comm=comm)

    return _apply(x, comm, exchanged, lambda dy: _alltoall(dy, comm))


def sendreceive(x: Tensor, source: int, destination: int, *, comm: Communicator | None = None) -> Tensor:
    """What ``source`` sends, while ``x`` goes to ``destination``: y_r = x_source. Same shape and dtype on all ranks.

    Every rank is the source of one rank and the destination of one. Adjoint: dx_r = dy_destination, the other way.
    """
    return _sendreceive(
        x, source, destination, _checked("sendreceive", x, comm, source=source, destination=destination)
    )


def _sendreceive(x: Tensor, source: int, destination: int, comm: Communicator) -> Tensor:
    return _apply(
        x,
        comm,
        lambda x: verbs.sendreceive(x.clone(), source, destination, comm=comm),
        lambda dy: _sendreceive(dy, destination, source, comm),
    )


class _Linear(Function):
    """A linear map of what all ranks bring. ``link`` requires a gradient where ``x`` does so on another rank alone."""

    @staticmethod
    def forward(x: Tensor, link: Tensor, value: _Map, adjoint: _Map, num_tracked: int, comm: Communicator) -> Tensor:
        return value(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *_, ctx.adjoint, ctx.num_tracked, ctx.comm = inputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and ctx.num_tracked < ctx.comm.size:
            raise RanksDisagree(
                f"nn.functional: x requires a gradient on {ctx.num_tracked} of {ctx.comm.size} ranks; for derivatives "
                "of derivatives (create_graph=True) it has to on all: x.requires_grad_()"
            )
        dx = ctx.adjoint(dy)  # on all ranks, wanted here or not
        return dx if ctx.needs_input_grad[0] else None, None, None, None, None, None


def _apply(x: Tensor, comm: Communicator, value: _Map, adjoint: _Map) -> Tensor:
    """``value(x)``, in the graph of autograd if any rank's ``x`` is. Collective."""
    # Backward is collective: a rank whose x needs no gradient has to take part where another rank's does.
    num_tracked = verbs.allreduce(int(x.requires_grad), comm=comm) if torch.is_grad_enabled() else 0
    if not num_tracked:
        return value(x.detach())
    link = torch.empty(0, requires_grad=True)
    y: Tensor = _Linear.apply(x, link, value, adjoint, num_tracked, comm)  # type: ignore[no-untyped-call]
    return y


def _checked(verb: str, x: Tensor, comm: Communicator | None, *, splits: bool = False, **ranks: int) -> Communicator:
    """The communicator to use. TypeError or ValueError, before it is made, for what the verb cannot take.

    ``splits``: the verb cuts ``x`` into equal slices.
    """
    given = communicators.resolve(comm)
    if torch._C._are_functorch_transforms_active():
        raise TypeError(f"nn.functional.{verb}: {NO_TRANSFORM}")
    check_tensor(f"nn.functional.{verb}", "x", x)
    for name, rank in ranks.items():
        check_rank(verb, name, rank, given.size)
    if splits:
        check_divisible(verb, x, given.size)
    return own_communicator(given)


def _check_op(verb: str, op: str) -> None:
    if op not in LINEAR_OPS:
        raise ValueError(
            f"nn.functional.{verb}: op {op!r} has no gradient here; {' and '.join(LINEAR_OPS)} have, "
            f"mpi.{verb} takes all"
        )


def _rows(x: Tensor) -> Tensor:
    """A tensor without dimensions counts as one row."""
    return x.reshape(1) if x.dim() == 0 else x


def _all_counts(x: Tensor, comm: Communicator) -> list[int]:
    """The number of rows that each rank brings. Collective."""
    counts: list[int] = verbs.allgather(_rows(x).shape[0], comm=comm)
    return counts


def _share(whole: Tensor, counts: list[int], comm: Communicator) -> Tensor:
    """This rank's rows of a tensor that has those of all ranks."""
    return whole.narrow(0, sum(counts[: comm.rank]), counts[comm.rank]).clone()


def _filled(rows: Tensor, count: int) -> Tensor:
    """The rows, with zeros behind them up to so many; where there are none autograd still follows."""
    missing = count - rows.shape[0]
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


compiling.leave_alone(allreduce, broadcast, reduce, reduce_scatter, allgather, gather, scatter, alltoall, sendreceive)
