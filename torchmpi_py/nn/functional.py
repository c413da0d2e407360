"""Collectives that autograd can differentiate: a network may pass its activations through them.

Each function takes the arguments of the collective of the same name, without ``out`` and ``flavour``. It does not
change ``x``, and it returns a new tensor. Each function is a linear map of the inputs of all P ranks, and its backward
pass is the adjoint map. Let x_r and y_r be the input and the result of rank r, and L the *sum of the losses of all
ranks*. The gradients of a rank are:

    dx_r = dL / dx_r      dy_r = dL / dy_r

So if every rank has the same loss after an ``allreduce``, the gradients are P times the gradients of one loss. Divide
the loss by P, or use ``op="avg"``. Only the ops sum and avg are linear.

- Every rank of ``comm`` (default: the current level) must call the same functions in the same order, forward and
  backward. If the loss of any rank depends on the result of a function, the backward pass of every rank must reach that
  function.
- If the result is only on ``root``, the other ranks get a tensor of zeros, or a tensor without rows. On these ranks,
  add the sum of this tensor to the loss, so that the backward pass reaches the function.
- If you pass ``inputs`` to ``torch.autograd.grad``, the inputs of all ranks must lead to the same functions.
- Autograd does not order the work of different devices in one graph, so use one communicator per device.
- Gradients flow if ``x`` requires a gradient on any rank, which the ranks determine by an allreduce of one number.
  Gradients must be enabled on all ranks, or disabled on all ranks (``torch.no_grad``).
- Second derivatives work if ``x`` requires a gradient on all ranks; otherwise RanksDisagree is raised.
- Other collectives may run during the backward pass, because these functions use their own communicator.

All functions raise TypeError and ValueError for wrong arguments, before anything is sent. They raise RanksDisagree and
CommunicatorError like the collectives they call.

Sources: the adjoints follow from the definitions of the collectives. torch.distributed.nn.functional has some of them.
ChainerMN had them for networks that are divided among ranks.
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
    """Return the duplicate of ``comm`` for layers, because reductions of gradients use ``comm`` during ``backward``.

    The first call creates the duplicate, and all ranks of ``comm`` must make this call.
    """
    return communicators.beside(communicators.resolve(comm), "layers")


def allreduce(x: Tensor, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """Return the sum (or mean) of the ``x`` of all ranks, on every rank: y_s = sum_r x_r.

    Every rank of ``comm`` must make this call. Adjoint: dx_r = sum_s dy_s, an allreduce. With "avg", both sums are
    divided by P.

    Args:
        x (Tensor): input, of the same shape and dtype on every rank; not changed.
        op (str): "sum" (default) or "avg".
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        TypeError: ``x`` is not a supported tensor.
        ValueError: ``op`` is neither "sum" nor "avg".

    Examples:
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = mpi.nn.functional.allreduce(x, op="avg")
        >>> y.sum().backward()
        >>> x.grad
        tensor([1., 1., 1.])
    """
    return _call("allreduce", x, comm, op=op)


def broadcast(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """Return the ``x`` of ``root`` on every rank: y_s = x_root.

    Every rank of ``comm`` must make this call. Adjoint: dx_root = sum_s dy_s, a reduce; zero on the other ranks.

    Args:
        x (Tensor): on ``root`` the input; on other ranks a tensor of the same shape and dtype. Not changed.
        root (int): rank whose ``x`` is sent; default 0.
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        TypeError: ``x`` is not a supported tensor, or ``root`` is not an integer.
        ValueError: ``root`` is not a rank of ``comm``.
    """
    return _call("broadcast", x, comm, root=root)


def reduce(x: Tensor, root: int = 0, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """Return the sum (or mean) of the ``x`` of all ranks on ``root``, and zeros on the other ranks: y_root = sum_r x_r.

    Every rank of ``comm`` must make this call. Adjoint: dx_r = dy_root, a broadcast. With "avg", y and dx are divided
    by P.

    Args:
        x (Tensor): input, of the same shape and dtype on every rank; not changed.
        root (int): rank that gets the result; default 0.
        op (str): "sum" (default) or "avg".
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        TypeError: ``x`` is not a supported tensor, or ``root`` is not an integer.
        ValueError: ``root`` is not a rank of ``comm``, or ``op`` is neither "sum" nor "avg".
    """
    return _call("reduce", x, comm, root=root, op=op)


def reduce_scatter(x: Tensor, op: str = "sum", *, comm: Communicator | None = None) -> Tensor:
    """Return slice r of the sum (or mean) of the ``x`` of all ranks on rank r: y_r = sum_s x_s[slice r].

    Every rank of ``comm`` must make this call. The P slices divide dim 0 equally. Adjoint: dx_s = (dy_0, dy_1, ...), an
    allgather. With "avg", y and dx are divided by P.

    Args:
        x (Tensor): input, of the same shape and dtype on every rank; dim 0 is a multiple of P. Not changed.
        op (str): "sum" (default) or "avg".
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor with the rows of one slice.

    Raises:
        TypeError: ``x`` is not a supported tensor.
        ValueError: dim 0 of ``x`` is not a multiple of P, or ``op`` is neither "sum" nor "avg".
    """
    return _call("reduce_scatter", x, comm, op=op)


def allgather(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """Return the ``x`` of all ranks, concatenated along dim 0 in rank order, on every rank.

    Every rank of ``comm`` must make this call. Adjoint: dx_r = sum_s dy_s[rows of rank r], a reduce_scatter if all
    ranks have the same number of rows, else an allreduce.

    Args:
        x (Tensor): input, not changed. The sizes of dim 0 may differ between ranks; a scalar counts as one row.
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor with the rows of all ranks.

    Raises:
        TypeError: ``x`` is not a supported tensor.
    """
    return _call("allgather", x, comm)


def gather(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """Return the ``x`` of all ranks, concatenated along dim 0 in rank order, on ``root``; no rows on the other ranks.

    Every rank of ``comm`` must make this call. Adjoint: dx_r = dy_root[rows of rank r], a scatter if all ranks have the
    same number of rows, else a broadcast.

    Args:
        x (Tensor): input, not changed. The sizes of dim 0 may differ between ranks; a scalar counts as one row.
        root (int): rank that gets the result; default 0.
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor with the rows of all ranks on ``root``, and with no rows on the other ranks.

    Raises:
        TypeError: ``x`` is not a supported tensor, or ``root`` is not an integer.
        ValueError: ``root`` is not a rank of ``comm``.
    """
    return _call("gather", x, comm, root=root)


def scatter(x: Tensor, root: int = 0, *, comm: Communicator | None = None) -> Tensor:
    """Return slice r of root's ``x`` on rank r: y_r = x_root[slice r].

    Every rank of ``comm`` must make this call. The P slices divide dim 0 equally. Adjoint: dx_root = (dy_0, dy_1, ...),
    a gather; zero on the other ranks.

    Args:
        x (Tensor): on ``root`` the input; on other ranks a tensor of the same shape and dtype. Not changed.
        root (int): rank whose ``x`` is divided; default 0.
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor with the rows of one slice.

    Raises:
        TypeError: ``x`` is not a supported tensor, or ``root`` is not an integer.
        ValueError: ``root`` is not a rank of ``comm``, or dim 0 of ``x`` is not a multiple of P.
    """
    return _call("scatter", x, comm, root=root)


def alltoall(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """Return the slices for this rank from all ranks: y_r[s] = x_s[r], where [s] is slice s.

    Every rank of ``comm`` must make this call. The P slices divide dim 0 equally. Adjoint: dx_s[r] = dy_r[s], an
    alltoall.

    Args:
        x (Tensor): input, of the same shape and dtype on every rank; dim 0 is a multiple of P. Not changed.
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor of the shape of ``x``; slice s is from rank s.

    Raises:
        TypeError: ``x`` is not a supported tensor.
        ValueError: dim 0 of ``x`` is not a multiple of P.
    """
    return _call("alltoall", x, comm)


def sendreceive(x: Tensor, source: int, destination: int, *, comm: Communicator | None = None) -> Tensor:
    """Send ``x`` to ``destination``, and return the ``x`` of ``source``: y_r = x_source.

    Every rank of ``comm`` must make this call. Every rank is the source of one rank and the destination of one rank.
    Adjoint: dx_r = dy_destination, a sendreceive in the opposite direction.

    Args:
        x (Tensor): input, of the same shape and dtype on every rank; not changed.
        source (int): rank whose ``x`` this rank receives.
        destination (int): rank that receives this rank's ``x``.
        comm (Communicator): ranks that make this call; default None, the current level.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        TypeError: ``x`` is not a supported tensor, or a rank is not an integer.
        ValueError: ``source`` or ``destination`` is not a rank of ``comm``.
    """
    return _call("sendreceive", x, comm, source=source, destination=destination)


def _call(verb: str, x: Tensor, comm: Communicator | None, **arguments: Any) -> Tensor:
    """Check the arguments, and apply the collective. Raise TypeError or ValueError before anything is sent."""
    comm = communicators.resolve(comm)
    if torch._C._are_functorch_transforms_active():
        raise TypeError(f"nn.functional.{verb}: {NO_TRANSFORM}")
    check_tensor(f"nn.functional.{verb}", "x", x)
    if arguments.get("op", "sum") not in ("sum", "avg"):
        raise ValueError(
            f"nn.functional.{verb}: op {arguments['op']!r} has no gradient here; use sum or avg, or call mpi.{verb}"
        )
    for name in arguments.keys() - {"op"}:
        check_rank(verb, name, arguments[name], comm.size)
    if verb in ("allgather", "gather") and x.dim() == 0:
        x = x.reshape(1)  # A scalar counts as one row.
    return _apply(verb, x, own_communicator(comm), **arguments)


def _apply(verb: str, x: Tensor, comm: Communicator, **arguments: Any) -> Tensor:
    """Apply a collective to ``x``, and record the call in autograd's graph if ``x`` requires a gradient on any rank.

    All ranks of ``comm`` must call this function.
    """
    # The backward pass calls a collective. So all ranks record the call if x requires a gradient on any rank.
    num_tracked = verbs.allreduce(int(x.requires_grad), comm=comm) if torch.is_grad_enabled() else 0
    if not num_tracked:
        return _value(verb, x.detach(), comm, arguments)
    link = torch.empty(0, requires_grad=True)
    y: Tensor = _Linear.apply(x, link, verb, comm, arguments, num_tracked)  # type: ignore[no-untyped-call]
    return y


def _value(verb: str, x: Tensor, comm: Communicator, arguments: dict[str, Any]) -> Tensor:
    """Return the result of a collective in a new tensor."""
    writes = COLLECTIVES[verb].writes
    if writes is Writes.X:
        x = x.clone()
    elif writes is Writes.X_WITHOUT_OUT:  # reduce writes ``out`` only on root, so other ranks return zeros.
        arguments = {**arguments, "out": torch.zeros_like(x) if verb == "reduce" else torch.empty_like(x)}
    y: Tensor | None = getattr(verbs, verb)(x, comm=comm, **arguments)
    return x.new_empty((0, *x.shape[1:])) if y is None else y


class _Linear(Function):
    """A linear map of the inputs of all ranks.

    ``link`` requires a gradient, so autograd calls ``backward`` even if only the ``x`` of another rank requires one.
    """

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
                f"nn.functional: x requires a gradient on {ctx.num_tracked} of {ctx.comm.size} ranks, but second "
                "derivatives (create_graph=True) need it on all ranks; call x.requires_grad_() on every rank"
            )
        # Every rank must make this call, even if it does not need dx.
        dx = _ADJOINTS[ctx.verb](dy, ctx.comm, ctx.num_rows, **ctx.arguments)
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
    """Return this rank's rows from a tensor that contains the rows of all ranks."""
    return whole.narrow(0, sum(counts[: comm.rank]), counts[comm.rank]).clone()


def _filled(rows: Tensor, count: int) -> Tensor:
    """Return the rows, padded with zeros to ``count`` rows. Even without rows, autograd records the operation."""
    num_missing = count - rows.shape[0]
    return torch.cat([rows, rows.new_zeros((num_missing, *rows.shape[1:]))]) if num_missing else rows


# Each function takes dy, the communicator, the number of rows of this rank's x, and the arguments of the collective.
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
