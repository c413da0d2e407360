"""The verbs: what each accepts, returns, guarantees and raises, written once for all flavours.

Every verb comes in two forms with the same arguments: ``mpi.<verb>`` returns the result, ``mpi.<verb>_async`` returns
at once a Handle whose ``wait()`` returns it. What holds for all:

- Every rank of ``comm`` (default: the current level) makes the same calls in the same order, with equal dtypes and
  shapes (but for dim 0 in ``allgather`` and ``gather``). Blocking and asynchronous forms are different calls (but send,
  recv and their twins may meet), and asynchronous calls come in the same order across all communicators. RanksDisagree
  where ranks of one node call different verbs, or with other sizes, dtypes, op or root: on the rank that comes later,
  or on all when the operation is over.
- Tensors may be of any dtype, strided, transposed, of size 0, or larger than 2^31 elements. 16-bit floats accumulate in
  float32. All ranks get the same bits. No gradient goes through a verb: ``backward`` through what a verb has written is
  a RuntimeError (``nn.functional`` has verbs with gradients).
- ``x`` is overwritten, unless ``out=`` is given or the result has another shape. Until an asynchronous operation is
  complete its tensors must not be touched.
- ``x`` may be a numpy or cupy array, whose memory is used as it is; then the result is an array of that kind, and so is
  ``out``. What holds for tensors holds for arrays; other ranks may pass tensors. A read-only array is an error where
  the verb overwrites ``x`` on any rank.
- ``x`` may be a number, but in ``reduce_scatter``, ``scatter`` and ``alltoall``: then the result is a number
  (``allgather``, ``gather``: a list of them). Numbers follow Python's rules; an int and a float may meet.
- ``op`` is one of sum, avg, prod, min, max, band, bor, bxor, land, lor. NaN wins in min and max. ``avg`` of integer
  tensors, bitwise ops of floats and min or max of complex numbers are errors. On bool, sum and max mean "or", prod and
  min "and".
- ``flavour`` forces one; else ``mpi.selector`` chooses by verb, size and place. A tensor from ``symmetric_empty`` on
  one rank meets one on every rank.
- Python objects (``broadcast_object``, ``allgather_object``) travel by pickle and come from the other ranks of the job:
  trust them as you trust your own program.
- A wrong argument is a TypeError or ValueError on every rank before anything is sent; NotStarted before ``start``;
  FlavourError where no flavour can carry the call out; CollectiveTimeout at the deadline, with ``at_deadline="raise"``;
  CommunicatorError if MPI fails.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from torchmpi_py.collectives import numbers
from torchmpi_py.collectives.arrays import NumpyArray
from torchmpi_py.collectives.plan import Operation
from torchmpi_py.collectives.prepare import Call, blocking_and_async, gathered, resolve_output, slice_out
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.tensors import (
    check_divisible,
    check_op,
    check_out,
    check_tensor,
    check_writable,
    flat,
    flat_copy,
    is_flat,
    output_buffer,
)

A = TypeVar("A", bound=Tensor | NumpyArray)
T = TypeVar("T", bound=Tensor | NumpyArray | numbers.Number)


def _broadcast(x: T, root: int = 0, *, comm: Communicator | None = None, flavour: str | None = None) -> Operation[T]:
    """Overwrite ``x`` on every rank by the ``x`` of ``root``. Returns ``x`` (or root's number)."""
    call = Call("broadcast", comm, flavour)
    root = call.rank("root", root)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_number(x, root)
    tensor = check_tensor("broadcast", "x", x)
    buffer, copy_out = output_buffer("broadcast", tensor, holds_input=True)
    return call.of_tensors(tensor, (buffer,), (root,), tensor, copy_out)


def _allreduce(
    x: T,
    *,
    out: Tensor | NumpyArray | None = None,
    op: str = "sum",
    comm: Communicator | None = None,
    flavour: str | None = None,
) -> Operation[T]:
    """Reduce the ``x`` of all ranks with ``op``; every rank gets the result, in ``out`` if given, else in ``x``.

    Returns ``out``, or ``x``; for a number, the number.
    """
    call = Call("allreduce", comm, flavour)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.reduced(x, out, op)
    tensor = check_tensor("allreduce", "x", x)
    check_op("allreduce", op, tensor.dtype)
    source, buffer, target, copy_out = resolve_output("allreduce", tensor, out)
    return call.of_tensors(target, (source, buffer), (op,), target, copy_out)


def _reduce(
    x: T,
    root: int = 0,
    *,
    out: Tensor | NumpyArray | None = None,
    op: str = "sum",
    comm: Communicator | None = None,
    flavour: str | None = None,
) -> Operation[T]:
    """Reduce the ``x`` of all ranks with ``op``; ``root`` gets the result, in ``out`` if given, else in ``x``.

    On the other ranks nothing is written, and the result is ``out``, or ``x``, as it was.
    """
    call = Call("reduce", comm, flavour)
    root = call.rank("root", root)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.reduced(x, out, op, root)
    tensor = check_tensor("reduce", "x", x)
    check_op("reduce", op, tensor.dtype)
    if call.comm.rank == root:
        source, buffer, target, copy_out = resolve_output("reduce", tensor, out)
    else:
        target = tensor if out is None else check_out("reduce", out, tensor, tensor.shape)
        if not is_flat(target):
            check_writable("reduce", target)  # as root does, where all pass such a tensor
        source = buffer = flat(tensor)
        copy_out = None
    return call.of_tensors(tensor, (source, buffer), (op, root), target, copy_out)


def _allgather(
    x: T, *, out: Tensor | NumpyArray | None = None, comm: Communicator | None = None, flavour: str | None = None
) -> Operation[Any]:
    """Concatenate the ``x`` of all ranks along dim 0, in rank order; dim-0 sizes may differ, 0 included.

    Returns ``out``, which must have the shape of the result, or a new tensor. A tensor without dimensions counts as one
    row; a number gives the list of all numbers. RanksDisagree if dtypes or other dimensions differ.
    """
    call = Call("allgather", comm, flavour)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_numbers(x, out, (), list)
    source, buffer, conclude = gathered("allgather", x, out)
    return call.of_rows(source, buffer, (), conclude, out)


def _gather(
    x: T,
    root: int = 0,
    *,
    out: Tensor | NumpyArray | None = None,
    comm: Communicator | None = None,
    flavour: str | None = None,
) -> Operation[Any]:
    """Concatenate the ``x`` of all ranks along dim 0, in rank order, on ``root``; dim-0 sizes may differ, 0 included.

    Root's result is ``out``, which must have the shape of the result, or a new tensor; a number gives the list of all
    numbers. The other ranks get None, and their ``out`` is not written. RanksDisagree if dtypes or other dimensions
    differ.
    """
    call = Call("gather", comm, flavour)
    root = call.rank("root", root)
    is_root = call.comm.rank == root
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_numbers(x, out, (root,), lambda values: values if is_root else None)
    out = out if is_root else None
    source, buffer, conclude = gathered("gather", x, out)
    return call.of_rows(source, buffer, (root,), conclude, out)


def _reduce_scatter(
    x: A,
    *,
    out: Tensor | NumpyArray | None = None,
    op: str = "sum",
    comm: Communicator | None = None,
    flavour: str | None = None,
) -> Operation[A]:
    """Reduce the ``x`` of all ranks with ``op``; rank r gets slice r, of ``size`` equal slices along dim 0.

    Returns ``out``, of shape (x.shape[0] / size, ...), or a new tensor.
    """
    call = Call("reduce_scatter", comm, flavour)
    tensor = check_tensor("reduce_scatter", "x", x)
    check_op("reduce_scatter", op, tensor.dtype)
    source, buffer, target, copy_out = slice_out("reduce_scatter", tensor, out, call.comm.size)
    return call.of_tensors(tensor, (source, buffer), (op,), target, copy_out)


def _scatter(
    x: A,
    root: int = 0,
    *,
    out: Tensor | NumpyArray | None = None,
    comm: Communicator | None = None,
    flavour: str | None = None,
) -> Operation[A]:
    """Rank r gets slice r, of ``size`` equal slices along dim 0, of root's ``x``.

    The other ranks pass an ``x`` of the same shape and dtype, whose values do not matter. Returns ``out``, of shape
    (x.shape[0] / size, ...), or a new tensor.
    """
    call = Call("scatter", comm, flavour)
    root = call.rank("root", root)
    tensor = check_tensor("scatter", "x", x)
    source, buffer, target, copy_out = slice_out("scatter", tensor, out, call.comm.size)
    return call.of_tensors(tensor, (source, buffer), (root,), target, copy_out)


def _alltoall(
    x: A, *, out: Tensor | NumpyArray | None = None, comm: Communicator | None = None, flavour: str | None = None
) -> Operation[A]:
    """Slice s of the result is this rank's slice of rank s's ``x``, of ``size`` equal slices along dim 0.

    Returns ``out``, of the shape of ``x``, or ``x`` itself, which is overwritten then.
    """
    call = Call("alltoall", comm, flavour)
    tensor = check_tensor("alltoall", "x", x)
    check_divisible("alltoall", tensor, call.comm.size)
    source, buffer, target, copy_out = resolve_output("alltoall", tensor, out)
    if source.data_ptr() == buffer.data_ptr():
        source = source.clone()
    return call.of_tensors(tensor, (source, buffer), (), target, copy_out)


def _sendreceive(
    x: T, source: int, destination: int, *, comm: Communicator | None = None, flavour: str | None = None
) -> Operation[T]:
    """Send ``x`` to ``destination`` and replace it by what ``source`` sends.

    Every rank that another rank names makes the call too; a ring shift is ``sendreceive(x, rank-1, rank+1)``.
    """
    call = Call("sendreceive", comm, flavour)
    source, destination = call.rank("source", source), call.rank("destination", destination)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_number(x, source, destination)
    tensor = check_tensor("sendreceive", "x", x)
    sent = flat_copy(tensor)
    buffer, copy_out = output_buffer("sendreceive", tensor, holds_input=False)
    return call.of_tensors(sent, (sent, buffer), (source, destination), tensor, copy_out)


def _send(x: T, destination: int, *, comm: Communicator | None = None, flavour: str | None = None) -> Operation[T]:
    """Send ``x`` to ``destination``, which receives it with ``recv``. Returns ``x``.

    Messages between two ranks arrive in the order of the calls, and must have the same dtype and size on both sides
    (RanksDisagree, on the receiver). A large blocking send waits for its receiver.
    """
    call = Call("send", comm, flavour)
    destination = call.rank("destination", destination)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_number(x, destination)
    tensor = check_tensor("send", "x", x)
    buffer = flat(tensor)
    return call.of_tensors(buffer, (buffer,), (destination,), tensor, None)


def _recv(x: T, source: int, *, comm: Communicator | None = None, flavour: str | None = None) -> Operation[T]:
    """Overwrite ``x`` by what ``source`` sends with ``send``: a tensor of the same dtype and shape, or a number."""
    call = Call("recv", comm, flavour)
    source = call.rank("source", source)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_number(x, source)
    tensor = check_tensor("recv", "x", x)
    buffer, copy_out = output_buffer("recv", tensor, holds_input=False)
    return call.of_tensors(buffer, (buffer,), (source,), tensor, copy_out)


broadcast, broadcast_async = blocking_and_async(_broadcast)
reduce, reduce_async = blocking_and_async(_reduce)
allreduce, allreduce_async = blocking_and_async(_allreduce)
allgather, allgather_async = blocking_and_async(_allgather)
gather, gather_async = blocking_and_async(_gather)
reduce_scatter, reduce_scatter_async = blocking_and_async(_reduce_scatter)
scatter, scatter_async = blocking_and_async(_scatter)
alltoall, alltoall_async = blocking_and_async(_alltoall)
sendreceive, sendreceive_async = blocking_and_async(_sendreceive)
send, send_async = blocking_and_async(_send)
recv, recv_async = blocking_and_async(_recv)


def _broadcast_object(
    obj: object, root: int = 0, *, comm: Communicator | None = None, flavour: str | None = None
) -> Operation[Any]:
    """Return root's object; the other ranks pass anything. Objects travel by pickle."""
    call = Call("broadcast_object", comm, flavour)
    return call.of_object(obj, call.rank("root", root))


def _allgather_object(
    obj: object, *, comm: Communicator | None = None, flavour: str | None = None
) -> Operation[list[Any]]:
    """Return the list of all ranks' objects, in rank order. Objects travel by pickle."""
    return Call("allgather_object", comm, flavour).of_object(obj)


broadcast_object, broadcast_object_async = blocking_and_async(_broadcast_object)
allgather_object, allgather_object_async = blocking_and_async(_allgather_object)
