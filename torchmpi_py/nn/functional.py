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

TypeError and ValueError as from the verbs; RanksDisagree and CommunicatorError as from these.

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
from torchmpi_py.core.collective import COLLECTIVES, Writes
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.tensors import NO_TRANSFORM, check_rank, check_tensor
from torchmpi_py.errors import RanksDisagree


def own_communicator(comm: Communicator | None) -> Communicator:
    """The duplicate of ``comm`` for layers: gradients use ``comm`` during the backward pass. Collective once."""
    return communicators.beside(communicators.resolve(comm), "layers")


def allreduce(x: Tensor, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """The sum (or average) of the ``x`` of all ranks, on all ranks: y_s = sum_r x_r.

    Adjoint: dx_r = sum_s dy_s, an allreduce; with "avg" both are divided by P.
    """
    return _call("allreduce", x, comm, op=op)


def broadcast(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """The ``x`` of ``root``, on all ranks: y_s = x_root. The others' ``x`` has the same shape and dtype.

    Adjoint: dx_root = sum_s dy_s, a reduce; zero on the other ranks.
    """
    return _call("broadcast", x, comm, root=root)


def reduce(x: Tensor, root: int = 0, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """The sum (or average) of the ``x`` of all ranks, on ``root``: y_root = sum_r x_r. Zeros on the others.

    Adjoint: dx_r = dy_root, a broadcast; with "avg" both are divided by P.
    """
    return _call("reduce", x, comm, root=root, op=op)


def reduce_scatter(x: Tensor, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """The sum (or average) of the ``x`` of all ranks, slice r of it on rank r: y_r = sum_s x_s[slice r].

    There are P equal slices along dim 0. Adjoint: dx_s = (dy_0, dy_1, ...), an allgather; with "avg" both are divided
    by P.
    """
    return _call("reduce_scatter", x, comm, op=op)


def allgather(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """The ``x`` of all ranks, concatenated along dim 0 in rank order, on all ranks; their dim-0 sizes may differ.

    Adjoint: dx_r = sum_s dy_s[rows of rank r], a reduce_scatter where all bring as many rows, else an allreduce.
    """
    return _call("allgather", x, comm)


def gather(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """The ``x`` of all ranks, concatenated along dim 0 in rank order, on ``root``; no rows on the other ranks.

    Their dim-0 sizes may differ. Adjoint: dx_r = dy_root[rows of rank r], a scatter where all bring as many rows, else
    a broadcast.
    """
    return _call("gather", x, comm, root=root)


def scatter(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """Slice r, of P equal slices along dim 0, of root's ``x``, on rank r: y_r = x_root[slice r].

    The others' ``x`` has the same shape and dtype. Adjoint: dx_root = (dy_0, dy_1, ...), a gather; zero on the others.
    """
    return _call("scatter", x, comm, root=root)


def alltoall(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """Slice s of the result is this rank's slice of rank s's ``x``, of P equal slices along dim 0: y_r[s] = x_s[r].

    Adjoint: dx_s[r] = dy_r[s], an alltoall.
    """
    return _call("alltoall", x, comm)


def sendreceive(x: Tensor, source: int, destination: int, *, comm: Communicator | None = None) -> Tensor:
    """What ``source`` sends, while ``x`` goes to ``destination``: y_r = x_source. Same shape and dtype on all ranks.

    Every rank is the source of one rank and the destination of one. Adjoint: dx_r = dy_destination, the other way.
    """
    return _call("sendreceive", x, comm, source=source, destination=destination)


def _call(verb: str, x: Tensor, comm: Communicator | None, **arguments: Any) -> Tensor:
    """Check what the verb is given, before anything is sent, and apply it. TypeError or ValueError with the remedy."""
    comm = communicators.resolve(comm)
    if torch._C._are_functorch_transforms_active():
        raise TypeError(f"nn.functional.{verb}: {NO_TRANSFORM}")
    check_tensor(f"nn.functional.{verb}", "x", x)
    if arguments.get("op", "sum") not in ("sum", "avg"):
        raise ValueError(
            f"nn.functional.{verb}: op {arguments['op']!r} has no gradient here; take sum or avg, or mpi.{verb}"
        )
    for name in arguments.keys() - {"op"}:
        check_rank(verb, name, arguments[name], comm.size)
    if verb in ("allgather", "gather") and x.dim() == 0:
        x = x.reshape(1)  # it counts as one row
    return _apply(verb, x, own_communicator(comm), **arguments)


def _apply(verb: str, x: Tensor, comm: Communicator, **arguments: Any) -> Tensor:
    """Apply a verb to ``x``, in the graph of autograd if any rank's ``x`` is in it. Collective."""
    # Backward is collective: a rank whose x needs no gradient has to take part where another rank's does.
    num_tracked = verbs.allreduce(int(x.requires_grad), comm=comm) if torch.is_grad_enabled() else 0
    if not num_tracked:
        return _value(verb, x.detach(), comm, arguments)
    link = torch.empty(0, requires_grad=True)
    y: Tensor = _Linear.apply(x, link, verb, comm, arguments, num_tracked)  # type: ignore[no-untyped-call]
    return y


def _value(verb: str, x: Tensor, comm: Communicator, arguments: dict[str, Any]) -> Tensor:
    """The result of a verb, in a new tensor."""
    writes = COLLECTIVES[verb].writes
    if writes is Writes.X:
        x = x.clone()
    elif writes is Writes.X_WITHOUT_OUT:  # which reduce does not write on other ranks than root
        arguments = {**arguments, "out": torch.zeros_like(x) if verb == "reduce" else torch.empty_like(x)}
    y: Tensor | None = getattr(verbs, verb)(x, comm=comm, **arguments)
    return x.new_empty((0, *x.shape[1:])) if y is None else y


class _Linear(Function):
    """A linear map of what all ranks bring. ``link`` requires a gradient where ``x`` does so on another rank alone."""

    @staticmethod
    def forward(
        x: Tensor, link: Tensor, verb: str, comm: Communicator, arguments: dict[str, Any], num_tracked: int
    ) -> Tensor:
        return _value(verb, x, comm, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.verb, ctx.comm, ctx.arguments, ctx.num_tracked = inputs
        ctx.num_rows = len(x) if x.dim() else 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and ctx.num_tracked < ctx.comm.size:
            raise RanksDisagree(
                f"nn.functional: x requires a gradient on {ctx.num_tracked} of {ctx.comm.size} ranks; for derivatives "
                "of derivatives (create_graph=True) it has to on all: x.requires_grad_()"
            )
        dx = _ADJOINTS[ctx.verb](dy, ctx.comm, ctx.num_rows, **ctx.arguments)  # on all ranks, wanted here or not
        return dx if ctx.needs_input_grad[0] else None, None, None, None, None, None


def _adjoint_of_allgather(dy: Tensor, comm: Communicator, num_rows: int) -> Tensor:
    counts = verbs.allgather(num_rows, comm=comm)
    if len(set(counts)) == 1:
        return _apply("reduce_scatter", dy, comm, op="sum")
    return _share(_apply("allreduce", dy, comm, op="sum"), counts, comm)


def _adjoint_of_gather(dy: Tensor, comm: Communicator, num_rows: int, root: int) -> Tensor:
    counts = verbs.allgather(num_rows, comm=comm)
    whole = _filled(dy, sum(counts))
    if len(set(counts)) == 1:
        return _apply("scatter", whole, comm, root=root)
    return _share(_apply("broadcast", whole, comm, root=root), counts, comm)


def _divided(dx: Tensor, comm: Communicator, op: str) -> Tensor:
    return dx / comm.size if op == "avg" else dx


def _share(whole: Tensor, counts: list[int], comm: Communicator) -> Tensor:
    """This rank's rows of a tensor that has those of all ranks."""
    return whole.narrow(0, sum(counts[: comm.rank]), counts[comm.rank]).clone()


def _filled(rows: Tensor, count: int) -> Tensor:
    """The rows, with zeros behind them up to so many; where there are none autograd still follows."""
    missing = count - rows.shape[0]
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


# Each takes dy, the communicator, the number of rows of this rank's x, and the arguments of the verb.
_ADJOINTS: dict[str, Callable[..., Tensor]] = {
    "allreduce": lambda dy, comm, _, op: _apply("allreduce", dy, comm, op=op),
    "broadcast": lambda dy, comm, _, root: _apply("reduce", dy, comm, root=root, op="sum"),
    "reduce": lambda dy, comm, _, root, op: _divided(_apply("broadcast", dy, comm, root=root), comm, op),
    "reduce_scatter": lambda dy, comm, _, op: _divided(_apply("allgather", dy, comm), comm, op),
    "allgather": _adjoint_of_allgather,
    "gather": _adjoint_of_gather,
    "scatter": lambda dy, comm, num_rows, root: _filled(_apply("gather", dy, comm, root=root), num_rows),
    "alltoall": lambda dy, comm, _: _apply("alltoall", dy, comm),
    "sendreceive": lambda dy, comm, _, source, destination: _apply(
        "sendreceive", dy, comm, source=destination, destination=source
    ),
}

compiling.leave_alone(allreduce, broadcast, reduce, reduce_scatter, allgather, gather, scatter, alltoall, sendreceive)
