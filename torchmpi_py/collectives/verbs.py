"""The collectives, and the messages between two ranks.

Each function has an asynchronous version with the same arguments. ``mpi.allreduce(x)`` returns the result.
``mpi.allreduce_async(x)`` immediately returns a handle, and ``handle.wait()`` returns the result.

- **Calls.** Every rank of ``comm`` must make the same calls in the same order, with the same shapes and dtypes (in
  ``allgather`` and ``gather``, dim 0 may differ between ranks). A blocking call never matches an asynchronous one
  (``send`` and ``recv`` excepted). Asynchronous calls, including calls on other communicators, must be in the same
  order on every rank.
- **Tensors.** A tensor may have any dtype, any strides, and any size, including 0 and more than 2^31 elements. The
  result is bitwise identical on all ranks. Sums of 16-bit floats accumulate in float32.
- **Memory.** ``x`` is overwritten unless ``out=`` is given or the result has a different shape. Do not touch the
  tensors of an asynchronous operation before it is complete.
- **Gradients.** Gradients do not pass through a collective: ``backward`` through a tensor that a collective has written
  raises RuntimeError. ``mpi.nn.functional`` has collectives with gradients.
- **Arrays.** ``x`` and ``out`` may be numpy or cupy arrays. Their memory is used without a copy, except that a
  read-only numpy array is copied. The result is an array of the same library. Other ranks may pass tensors.
- **Numbers.** ``x`` may be a Python or NumPy number, except in ``reduce_scatter``, ``scatter`` and ``alltoall``. The
  result is then a number, or a list of numbers in ``allgather`` and ``gather``. Python's rules apply, and one rank may
  pass an int while another passes a float.
- **Ops.** The "min" or "max" of values that include NaN is NaN. "avg" of integer tensors, bitwise ops of floats, and
  "min" or "max" of complex numbers are errors. For bool tensors, "sum" and "max" mean "or"; "prod" and "min" mean
  "and".
- **Flavours.** A flavour is an implementation of the collectives. ``mpi.selector`` chooses the flavour of each call by
  collective, size and device, unless ``flavour=`` names one. Pass a tensor from ``mpi.symmetric_empty`` on every rank
  or on no rank.
"""

# mypy: disable-error-code="empty-body, no-any-return"
# The body of a blocking collective checks the arguments and prepares the operation, which the decorator carries out. An
# asynchronous version has no body: its decorator launches the operation that the blocking version prepares.

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from torchmpi_py.collectives import numbers
from torchmpi_py.collectives.arrays import NumpyArray
from torchmpi_py.collectives.prepare import Call, asynchronous, blocking, gathered, resolve_output, slice_out
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle
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

Array = Tensor | NumpyArray
A = TypeVar("A", bound=Array)
T = TypeVar("T", bound=Array | numbers.Number)


@blocking
def broadcast(x: T, root: int = 0, *, comm: Communicator | None = None, flavour: str | None = None) -> T:
    """Overwrite ``x`` on every rank with the ``x`` of ``root``.

    Every rank of ``comm`` must make this call. **Overwrites** ``x``, unless ``x`` is a number. The call returns when
    this rank's part is complete. Other ranks may still be working.

    Args:
        x (Tensor, numpy or cupy array, or number): on ``root``, the value to send; on other ranks, memory to overwrite.
            The shape and dtype are the same on every rank.
        root (int): rank in ``comm`` whose ``x`` is sent; default 0, the same on every rank.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``x`` itself, or the number of ``root``.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes or roots.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> x = torch.full((2,), float(mpi.rank()))
        >>> mpi.broadcast(x, root=0)
        tensor([0., 0.])
    """
    call = Call("broadcast", comm, flavour)
    root = call.rank("root", root)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_number(x, root)
    tensor = check_tensor("broadcast", "x", x)
    buffer, copy_out = output_buffer("broadcast", tensor, holds_input=True)
    return call.of_tensors(tensor, (buffer,), (root,), tensor, copy_out)


@asynchronous(broadcast)
def broadcast_async(x: T, root: int = 0, *, comm: Communicator | None = None, flavour: str | None = None) -> Handle[T]:
    """Start to overwrite ``x`` on every rank with the ``x`` of ``root``.

    Asynchronous version of ``broadcast``: every rank of ``comm`` must make this call, which returns immediately.
    **Overwrites** ``x``. Do not read or write ``x`` before the handle is complete. All asynchronous calls, including
    calls on other communicators, must be in the same order on every rank.

    Args:
        x (Tensor, numpy or cupy array, or number): on ``root``, the value to send; on other ranks, memory to overwrite.
            The shape and dtype are the same on every rank.
        root (int): rank in ``comm`` whose ``x`` is sent; default 0, the same on every rank.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns ``x`` itself, or the number of ``root``.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes or roots; raised here or
            by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> x = torch.full((2,), float(mpi.rank()))
        >>> handle = mpi.broadcast_async(x, root=0)
        >>> handle.wait()
        tensor([0., 0.])
    """


@blocking
def allreduce(
    x: T, *, out: Array | None = None, op: str = "sum", comm: Communicator | None = None, flavour: str | None = None
) -> T:
    """Reduce the ``x`` of all ranks with ``op``, and give the result to every rank.

    Every rank of ``comm`` must make this call. **Overwrites** ``x`` with the result, unless ``out`` is given or ``x``
    is a number. The call returns when this rank's part is complete. Other ranks may still be working.

    The result is bitwise identical on all ranks. Sums of 16-bit floats accumulate in float32.

    Args:
        x (Tensor, numpy or cupy array, or number): values to reduce, of the same shape and dtype on every rank.
        out (Tensor or array): memory for the result, of the shape and dtype of ``x``; default None, ``x`` itself.
        op (str): "sum" (default), "avg", "prod", "min", "max", "band", "bor", "bxor", "land" or "lor".
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``out`` if given, else ``x`` itself; for a number, the reduced number.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes or ops.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> x = torch.ones(3)
        >>> total = mpi.allreduce(x)
        >>> total is x, total.eq(mpi.size()).all().item()
        (True, True)
        >>> mpi.allreduce(2.5, op="avg")
        2.5
    """
    call = Call("allreduce", comm, flavour)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.reduced(x, out, op)
    tensor = check_tensor("allreduce", "x", x)
    check_op("allreduce", op, tensor.dtype)
    source, buffer, target, copy_out = resolve_output("allreduce", tensor, out)
    return call.of_tensors(target, (source, buffer), (op,), target, copy_out)


@asynchronous(allreduce)
def allreduce_async(
    x: T, *, out: Array | None = None, op: str = "sum", comm: Communicator | None = None, flavour: str | None = None
) -> Handle[T]:
    """Start to reduce the ``x`` of all ranks with ``op``; every rank gets the result.

    Asynchronous version of ``allreduce``: every rank of ``comm`` must make this call, which returns immediately.
    **Overwrites** ``x``, unless ``out`` is given. Do not read or write ``x`` or ``out`` before the handle is complete.
    All asynchronous calls, including calls on other communicators, must be in the same order on every rank.

    The result is bitwise identical on all ranks. Sums of 16-bit floats accumulate in float32.

    Args:
        x (Tensor, numpy or cupy array, or number): values to reduce, of the same shape and dtype on every rank.
        out (Tensor or array): memory for the result, of the shape and dtype of ``x``; default None, ``x`` itself.
        op (str): "sum" (default), "avg", "prod", "min", "max", "band", "bor", "bxor", "land" or "lor".
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns ``out`` if given, else ``x`` itself; for a number, the reduced number.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes or ops; raised here or by
            ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> x = torch.ones(3)
        >>> handle = mpi.allreduce_async(x)
        >>> y = torch.ones(5).sum()  # other work while the ranks communicate
        >>> total = handle.wait()
        >>> total is x, total.eq(mpi.size()).all().item()
        (True, True)
    """


@blocking
def reduce(
    x: T, root: int = 0, *, out: Array | None = None, op: str = "sum",
    comm: Communicator | None = None, flavour: str | None = None,
) -> T:  # fmt: skip
    """Reduce the ``x`` of all ranks with ``op``, and give the result to ``root``.

    Every rank of ``comm`` must make this call. **Overwrites** ``x`` on ``root``, unless ``out`` is given; on the other
    ranks nothing is written. The call returns when this rank's part is complete. Other ranks may still be working.

    Args:
        x (Tensor, numpy or cupy array, or number): values to reduce, of the same shape and dtype on every rank.
        root (int): rank in ``comm`` that gets the result; default 0, the same on every rank.
        out (Tensor or array): memory for the result, of the shape and dtype of ``x``, written on ``root`` only; default
            None, ``x`` itself.
        op (str): "sum" (default), "avg", "prod", "min", "max", "band", "bor", "bxor", "land" or "lor".
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``out`` if given, else ``x`` itself, with the result on ``root`` and unchanged on other ranks; for a number, the
            reduced number on ``root`` and ``x`` on other ranks.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes, ops or roots.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> x = mpi.reduce(torch.ones(2), root=0)
        >>> x[0].item() == (mpi.size() if mpi.rank() == 0 else 1)
        True
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
            check_writable("reduce", target)  # ``root`` makes the same check, so all ranks raise the error.
        source = buffer = flat(tensor)
        copy_out = None
    return call.of_tensors(tensor, (source, buffer), (op, root), target, copy_out)


@asynchronous(reduce)
def reduce_async(
    x: T, root: int = 0, *, out: Array | None = None, op: str = "sum",
    comm: Communicator | None = None, flavour: str | None = None,
) -> Handle[T]:  # fmt: skip
    """Start to reduce the ``x`` of all ranks with ``op``; ``root`` gets the result.

    Asynchronous version of ``reduce``: every rank of ``comm`` must make this call, which returns immediately.
    **Overwrites** ``x`` on ``root``, unless ``out`` is given; on the other ranks nothing is written. Do not read or
    write ``x`` or ``out`` before the handle is complete. All asynchronous calls, including calls on other
    communicators, must be in the same order on every rank.

    Args:
        x (Tensor, numpy or cupy array, or number): values to reduce, of the same shape and dtype on every rank.
        root (int): rank in ``comm`` that gets the result; default 0, the same on every rank.
        out (Tensor or array): memory for the result, of the shape and dtype of ``x``, written on ``root`` only; default
            None, ``x`` itself.
        op (str): "sum" (default), "avg", "prod", "min", "max", "band", "bor", "bxor", "land" or "lor".
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns ``out`` if given, else ``x`` itself, with the result on ``root`` and unchanged
            on other ranks. For a number it returns the reduced number on ``root`` and ``x`` on other ranks.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes, ops or roots; raised
            here or by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> handle = mpi.reduce_async(torch.ones(2), root=0)
        >>> x = handle.wait()
        >>> x[0].item() == (mpi.size() if mpi.rank() == 0 else 1)
        True
    """


@blocking
def allgather(x: T, *, out: Array | None = None, comm: Communicator | None = None, flavour: str | None = None) -> Any:
    """Concatenate the ``x`` of all ranks along dim 0, in rank order.

    Every rank of ``comm`` must make this call. ``x`` is not changed. The call returns when this rank's part is
    complete. Other ranks may still be working.

    Args:
        x (Tensor, numpy or cupy array, or number): this rank's rows. Dim 0 may differ between ranks and may be 0; the
            other dims and the dtype are the same on every rank. A tensor without dimensions counts as one row.
        out (Tensor or array): memory for the result, with the total number of rows; default None, a new tensor.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``out`` if given, else a new tensor, or a new array if ``x`` is an array; for a number, the list of all ranks'
            numbers.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different dtypes, or shapes that differ in more
            than dim 0.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> rows = mpi.allgather(torch.full((1, 2), mpi.rank()))
        >>> rows[:, 0].tolist() == list(range(mpi.size()))
        True
        >>> mpi.allgather(mpi.rank()) == list(range(mpi.size()))
        True
    """
    call = Call("allgather", comm, flavour)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_numbers(x, out, (), list)
    source, buffer, conclude = gathered("allgather", x, out)
    return call.of_rows(source, buffer, (), conclude, out)


@asynchronous(allgather)
def allgather_async(
    x: T, *, out: Array | None = None, comm: Communicator | None = None, flavour: str | None = None
) -> Handle[Any]:
    """Start to concatenate the ``x`` of all ranks along dim 0, in rank order.

    Asynchronous version of ``allgather``: every rank of ``comm`` must make this call, which returns immediately. ``x``
    is not changed. Do not read or write ``x`` or ``out`` before the handle is complete. All asynchronous calls,
    including calls on other communicators, must be in the same order on every rank.

    Args:
        x (Tensor, numpy or cupy array, or number): this rank's rows. Dim 0 may differ between ranks and may be 0; the
            other dims and the dtype are the same on every rank. A tensor without dimensions counts as one row.
        out (Tensor or array): memory for the result, with the total number of rows; default None, a new tensor.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns ``out`` if given, else a new tensor, or a new array if ``x`` is an array. For
            a number it returns the list of all ranks' numbers.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different dtypes, or shapes that differ in more
            than dim 0; raised here or by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> handle = mpi.allgather_async(torch.full((1, 2), mpi.rank()))
        >>> rows = handle.wait()
        >>> rows[:, 0].tolist() == list(range(mpi.size()))
        True
    """


@blocking
def gather(
    x: T, root: int = 0, *, out: Array | None = None, comm: Communicator | None = None, flavour: str | None = None
) -> Any:
    """Concatenate the ``x`` of all ranks along dim 0, in rank order, on ``root``.

    Every rank of ``comm`` must make this call. ``x`` is not changed. The call returns when this rank's part is
    complete. Other ranks may still be working.

    Args:
        x (Tensor, numpy or cupy array, or number): this rank's rows. Dim 0 may differ between ranks and may be 0; the
            other dims and the dtype are the same on every rank. A tensor without dimensions counts as one row.
        root (int): rank in ``comm`` that gets the result; default 0, the same on every rank.
        out (Tensor or array): memory for the result on ``root``, with the total number of rows; default None, a new
            tensor. Ignored on other ranks.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        On ``root``, ``out`` if given, else a new tensor, or a new array if ``x`` is an array; for numbers, the list of
            all ranks' numbers. On other ranks, None.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different dtypes or roots, or shapes that differ
            in more than dim 0.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> ranks = mpi.gather(mpi.rank(), root=0)
        >>> ranks == (list(range(mpi.size())) if mpi.rank() == 0 else None)
        True
    """
    call = Call("gather", comm, flavour)
    root = call.rank("root", root)
    is_root = call.comm.rank == root
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_numbers(x, out, (root,), lambda values: values if is_root else None)
    out = out if is_root else None
    source, buffer, conclude = gathered("gather", x, out)
    return call.of_rows(source, buffer, (root,), conclude, out)


@asynchronous(gather)
def gather_async(
    x: T, root: int = 0, *, out: Array | None = None, comm: Communicator | None = None, flavour: str | None = None
) -> Handle[Any]:
    """Start to concatenate the ``x`` of all ranks along dim 0, in rank order, on ``root``.

    Asynchronous version of ``gather``: every rank of ``comm`` must make this call, which returns immediately. ``x`` is
    not changed. Do not read or write ``x`` or ``out`` before the handle is complete. All asynchronous calls, including
    calls on other communicators, must be in the same order on every rank.

    Args:
        x (Tensor, numpy or cupy array, or number): this rank's rows. Dim 0 may differ between ranks and may be 0; the
            other dims and the dtype are the same on every rank. A tensor without dimensions counts as one row.
        root (int): rank in ``comm`` that gets the result; default 0, the same on every rank.
        out (Tensor or array): memory for the result on ``root``, with the total number of rows; default None, a new
            tensor. Ignored on other ranks.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle. On ``root``, ``wait()`` returns ``out`` if given, else a new tensor, or a new array if ``x`` is an
            array; for numbers, it returns the list of all ranks' numbers. On other ranks, ``wait()`` returns None.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different dtypes or roots, or shapes that differ
            in more than dim 0; raised here or by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> handle = mpi.gather_async(mpi.rank(), root=0)
        >>> handle.wait() == (list(range(mpi.size())) if mpi.rank() == 0 else None)
        True
    """


@blocking
def reduce_scatter(
    x: A, *, out: Array | None = None, op: str = "sum", comm: Communicator | None = None, flavour: str | None = None
) -> A:
    """Reduce the ``x`` of all ranks with ``op``, and give slice r of the result to each rank r.

    Every rank of ``comm`` must make this call. The result is cut into as many equal slices along dim 0 as ``comm`` has
    ranks. ``x`` is not changed. The call returns when this rank's part is complete. Other ranks may still be working.

    Args:
        x (Tensor, numpy or cupy array): values to reduce, of the same shape and dtype on every rank; the size of dim 0
            is a multiple of the number of ranks.
        out (Tensor or array): memory for the result, of shape ``(x.shape[0] / size, ...)``; default None, a new tensor.
        op (str): "sum" (default), "avg", "prod", "min", "max", "band", "bor", "bxor", "land" or "lor".
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        This rank's slice, in ``out`` if given, else in a new tensor, or in a new array if ``x`` is an array.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes or ops.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> x = torch.arange(2.0).repeat(mpi.size())
        >>> mpi.reduce_scatter(x, op="avg")
        tensor([0., 1.])
    """
    call = Call("reduce_scatter", comm, flavour)
    tensor = check_tensor("reduce_scatter", "x", x)
    check_op("reduce_scatter", op, tensor.dtype)
    source, buffer, target, copy_out = slice_out("reduce_scatter", tensor, out, call.comm.size)
    return call.of_tensors(tensor, (source, buffer), (op,), target, copy_out)


@asynchronous(reduce_scatter)
def reduce_scatter_async(
    x: A, *, out: Array | None = None, op: str = "sum", comm: Communicator | None = None, flavour: str | None = None
) -> Handle[A]:
    """Start to reduce the ``x`` of all ranks with ``op``; each rank r gets slice r of the result.

    Asynchronous version of ``reduce_scatter``: every rank of ``comm`` must make this call, which returns immediately.
    The result is cut into as many equal slices along dim 0 as ``comm`` has ranks. ``x`` is not changed. Do not read or
    write ``x`` or ``out`` before the handle is complete. All asynchronous calls, including calls on other
    communicators, must be in the same order on every rank.

    Args:
        x (Tensor, numpy or cupy array): values to reduce, of the same shape and dtype on every rank; the size of dim 0
            is a multiple of the number of ranks.
        out (Tensor or array): memory for the result, of shape ``(x.shape[0] / size, ...)``; default None, a new tensor.
        op (str): "sum" (default), "avg", "prod", "min", "max", "band", "bor", "bxor", "land" or "lor".
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns this rank's slice, in ``out`` if given, else in a new tensor, or in a new
            array if ``x`` is an array.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes or ops; raised here or by
            ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> x = torch.arange(2.0).repeat(mpi.size())
        >>> handle = mpi.reduce_scatter_async(x, op="avg")
        >>> handle.wait()
        tensor([0., 1.])
    """


@blocking
def scatter(
    x: A, root: int = 0, *, out: Array | None = None, comm: Communicator | None = None, flavour: str | None = None
) -> A:
    """Send slice r of the ``x`` of ``root`` to each rank r.

    Every rank of ``comm`` must make this call. ``x`` is cut into as many equal slices along dim 0 as ``comm`` has
    ranks, and is not changed. The call returns when this rank's part is complete. Other ranks may still be working.

    Args:
        x (Tensor, numpy or cupy array): on ``root``, the values to distribute; on other ranks, a tensor of the same
            shape and dtype, whose values do not matter. The size of dim 0 is a multiple of the number of ranks.
        root (int): rank in ``comm`` whose ``x`` is distributed; default 0, the same on every rank.
        out (Tensor or array): memory for the result, of shape ``(x.shape[0] / size, ...)``; default None, a new tensor.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        This rank's slice, in ``out`` if given, else in a new tensor, or in a new array if ``x`` is an array.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes or roots.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> x = torch.arange(2 * mpi.size())
        >>> mpi.scatter(x, root=0).tolist() == [2 * mpi.rank(), 2 * mpi.rank() + 1]
        True
    """
    call = Call("scatter", comm, flavour)
    root = call.rank("root", root)
    tensor = check_tensor("scatter", "x", x)
    source, buffer, target, copy_out = slice_out("scatter", tensor, out, call.comm.size)
    return call.of_tensors(tensor, (source, buffer), (root,), target, copy_out)


@asynchronous(scatter)
def scatter_async(
    x: A, root: int = 0, *, out: Array | None = None, comm: Communicator | None = None, flavour: str | None = None
) -> Handle[A]:
    """Start to send slice r of the ``x`` of ``root`` to each rank r.

    Asynchronous version of ``scatter``: every rank of ``comm`` must make this call, which returns immediately. ``x`` is
    cut into as many equal slices along dim 0 as ``comm`` has ranks, and is not changed. Do not read or write ``x`` or
    ``out`` before the handle is complete. All asynchronous calls, including calls on other communicators, must be in
    the same order on every rank.

    Args:
        x (Tensor, numpy or cupy array): on ``root``, the values to distribute; on other ranks, a tensor of the same
            shape and dtype, whose values do not matter. The size of dim 0 is a multiple of the number of ranks.
        root (int): rank in ``comm`` whose ``x`` is distributed; default 0, the same on every rank.
        out (Tensor or array): memory for the result, of shape ``(x.shape[0] / size, ...)``; default None, a new tensor.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns this rank's slice, in ``out`` if given, else in a new tensor, or in a new
            array if ``x`` is an array.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes, dtypes or roots; raised here or
            by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> x = torch.arange(2 * mpi.size())
        >>> handle = mpi.scatter_async(x, root=0)
        >>> handle.wait().tolist() == [2 * mpi.rank(), 2 * mpi.rank() + 1]
        True
    """


@blocking
def alltoall(x: A, *, out: Array | None = None, comm: Communicator | None = None, flavour: str | None = None) -> A:
    """Send slice s of ``x`` to each rank s, and receive a slice from each rank.

    Every rank of ``comm`` must make this call. ``x`` is cut into as many equal slices along dim 0 as ``comm`` has
    ranks; slice s of the result comes from rank s. **Overwrites** ``x`` with the result, unless ``out`` is given. The
    call returns when this rank's part is complete. Other ranks may still be working.

    Args:
        x (Tensor, numpy or cupy array): slices to send, of the same shape and dtype on every rank; the size of dim 0 is
            a multiple of the number of ranks.
        out (Tensor or array): memory for the result, of the shape and dtype of ``x``; default None, ``x`` itself.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``out`` if given, else ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes or dtypes.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> x = torch.full((mpi.size(),), mpi.rank())
        >>> mpi.alltoall(x).tolist() == list(range(mpi.size()))
        True
    """
    call = Call("alltoall", comm, flavour)
    tensor = check_tensor("alltoall", "x", x)
    check_divisible("alltoall", tensor, call.comm.size)
    source, buffer, target, copy_out = resolve_output("alltoall", tensor, out)
    if source.data_ptr() == buffer.data_ptr():
        source = source.clone()
    return call.of_tensors(tensor, (source, buffer), (), target, copy_out)


@asynchronous(alltoall)
def alltoall_async(
    x: A, *, out: Array | None = None, comm: Communicator | None = None, flavour: str | None = None
) -> Handle[A]:
    """Start to send slice s of ``x`` to each rank s, and to receive a slice from each rank.

    Asynchronous version of ``alltoall``: every rank of ``comm`` must make this call, which returns immediately. ``x``
    is cut into as many equal slices along dim 0 as ``comm`` has ranks; slice s of the result comes from rank s.
    **Overwrites** ``x``, unless ``out`` is given. Do not read or write ``x`` or ``out`` before the handle is complete.
    All asynchronous calls, including calls on other communicators, must be in the same order on every rank.

    Args:
        x (Tensor, numpy or cupy array): slices to send, of the same shape and dtype on every rank; the size of dim 0 is
            a multiple of the number of ranks.
        out (Tensor or array): memory for the result, of the shape and dtype of ``x``; default None, ``x`` itself.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns ``out`` if given, else ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different sizes or dtypes; raised here or by
            ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> x = torch.full((mpi.size(),), mpi.rank())
        >>> handle = mpi.alltoall_async(x)
        >>> handle.wait().tolist() == list(range(mpi.size()))
        True
    """


@blocking
def sendreceive(
    x: T, source: int, destination: int, *, comm: Communicator | None = None, flavour: str | None = None
) -> T:
    """Send ``x`` to ``destination``, and overwrite ``x`` with the value that ``source`` sends.

    Every rank that is a source or a destination must make this call. **Overwrites** ``x``, unless ``x`` is a number.
    The call returns when this rank's part is complete. Other ranks may still be working.

    Args:
        x (Tensor, numpy or cupy array, or number): value to send, of the shape and dtype of the value to receive.
        source (int): rank in ``comm`` from which to receive.
        destination (int): rank in ``comm`` to which to send.
        comm (Communicator): communicator to which the ranks belong; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``x`` itself, with the value from ``source``; for a number, the number from ``source``.

    Raises:
        TypeError: an argument has the wrong type or an unknown name.
        ValueError: an argument has an invalid value, such as a rank that ``comm`` does not have.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: the message has a different dtype or size than ``x``; raised on the receiver.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed.

    Examples:
        >>> left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
        >>> mpi.sendreceive(mpi.rank(), source=left, destination=right) == left
        True
    """
    call = Call("sendreceive", comm, flavour)
    source, destination = call.rank("source", source), call.rank("destination", destination)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_number(x, source, destination)
    tensor = check_tensor("sendreceive", "x", x)
    sent = flat_copy(tensor)
    buffer, copy_out = output_buffer("sendreceive", tensor, holds_input=False)
    return call.of_tensors(sent, (sent, buffer), (source, destination), tensor, copy_out)


@asynchronous(sendreceive)
def sendreceive_async(
    x: T, source: int, destination: int, *, comm: Communicator | None = None, flavour: str | None = None
) -> Handle[T]:
    """Start to send ``x`` to ``destination``, and to overwrite ``x`` with the value that ``source`` sends.

    Asynchronous version of ``sendreceive``: every rank that is a source or a destination must make this call, which
    returns immediately. **Overwrites** ``x``. Do not read or write ``x`` before the handle is complete.

    Args:
        x (Tensor, numpy or cupy array, or number): value to send, of the shape and dtype of the value to receive.
        source (int): rank in ``comm`` from which to receive.
        destination (int): rank in ``comm`` to which to send.
        comm (Communicator): communicator to which the ranks belong; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns ``x`` itself, with the value from ``source``; for a number, the number from
            ``source``.

    Raises:
        TypeError: an argument has the wrong type or an unknown name.
        ValueError: an argument has an invalid value, such as a rank that ``comm`` does not have.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: the message has a different dtype or size than ``x``; raised on the receiver, by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
        >>> handle = mpi.sendreceive_async(mpi.rank(), source=left, destination=right)
        >>> handle.wait() == left
        True
    """


@blocking
def send(x: T, destination: int, *, comm: Communicator | None = None, flavour: str | None = None) -> T:
    """Send ``x`` to ``destination``, which receives it with ``recv``.

    The sender makes this call, and ``destination`` makes the matching call of ``recv`` or ``recv_async``. ``x`` is not
    changed. Messages between two ranks arrive in the order of the calls. A call with a large ``x`` returns only after
    ``destination`` has started to receive.

    Args:
        x (Tensor, numpy or cupy array, or number): value to send.
        destination (int): rank in ``comm`` to which to send.
        comm (Communicator): communicator to which the ranks belong; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type or an unknown name.
        ValueError: an argument has an invalid value, such as a rank that ``comm`` does not have.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed.

    Examples:
        >>> left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
        >>> handle = mpi.recv_async(torch.zeros(2), source=left)
        >>> mpi.send(torch.ones(2), destination=right)
        tensor([1., 1.])
        >>> handle.wait()
        tensor([1., 1.])
    """
    call = Call("send", comm, flavour)
    destination = call.rank("destination", destination)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_number(x, destination)
    tensor = check_tensor("send", "x", x)
    buffer = flat(tensor)
    return call.of_tensors(buffer, (buffer,), (destination,), tensor, None)


@asynchronous(send)
def send_async(x: T, destination: int, *, comm: Communicator | None = None, flavour: str | None = None) -> Handle[T]:
    """Start to send ``x`` to ``destination``, which receives it with ``recv`` or ``recv_async``.

    Asynchronous version of ``send``: only the sender makes this call, which returns immediately. ``x`` is not changed.
    Messages between two ranks arrive in the order of the calls. Do not write ``x`` before the handle is complete.

    Args:
        x (Tensor, numpy or cupy array, or number): value to send.
        destination (int): rank in ``comm`` to which to send.
        comm (Communicator): communicator to which the ranks belong; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns ``x`` itself once ``x`` may be written again.

    Raises:
        TypeError: an argument has the wrong type or an unknown name.
        ValueError: an argument has an invalid value, such as a rank that ``comm`` does not have.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
        >>> handle = mpi.send_async(torch.ones(2), destination=right)
        >>> mpi.recv(torch.zeros(2), source=left)
        tensor([1., 1.])
        >>> handle.wait()
        tensor([1., 1.])
    """


@blocking
def recv(x: T, source: int, *, comm: Communicator | None = None, flavour: str | None = None) -> T:
    """Overwrite ``x`` with the value that ``source`` sends with ``send`` or ``send_async``.

    The receiver makes this call, and ``source`` makes the matching call of ``send`` or ``send_async``. **Overwrites**
    ``x``, unless ``x`` is a number. A call without a matching ``send`` waits until the timeout.

    Args:
        x (Tensor, numpy or cupy array, or number): memory to overwrite, with the dtype and shape of the message. To
            receive a number, pass any number.
        source (int): rank in ``comm`` from which to receive.
        comm (Communicator): communicator to which the ranks belong; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``x`` itself, or the number that ``source`` sent.

    Raises:
        TypeError: an argument has the wrong type or an unknown name.
        ValueError: an argument has an invalid value, such as a rank that ``comm`` does not have.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: the message has a different dtype or size than ``x``; raised on the receiver.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed.

    Examples:
        >>> left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
        >>> handle = mpi.send_async(torch.ones(2), destination=right)
        >>> mpi.recv(torch.zeros(2), source=left)
        tensor([1., 1.])
        >>> handle.wait()
        tensor([1., 1.])
    """
    call = Call("recv", comm, flavour)
    source = call.rank("source", source)
    if not isinstance(x, Tensor) and isinstance(x, numbers.NUMBERS):
        return call.of_number(x, source)
    tensor = check_tensor("recv", "x", x)
    buffer, copy_out = output_buffer("recv", tensor, holds_input=False)
    return call.of_tensors(buffer, (buffer,), (source,), tensor, copy_out)


@asynchronous(recv)
def recv_async(x: T, source: int, *, comm: Communicator | None = None, flavour: str | None = None) -> Handle[T]:
    """Start to overwrite ``x`` with the value that ``source`` sends with ``send`` or ``send_async``.

    Asynchronous version of ``recv``: only the receiver makes this call, which returns immediately. **Overwrites**
    ``x``. Do not read or write ``x`` before the handle is complete.

    Args:
        x (Tensor, numpy or cupy array, or number): memory to overwrite, with the dtype and shape of the message. To
            receive a number, pass any number.
        source (int): rank in ``comm`` from which to receive.
        comm (Communicator): communicator to which the ranks belong; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns ``x`` itself, or the number that ``source`` sent.

    Raises:
        TypeError: an argument has the wrong type or an unknown name.
        ValueError: an argument has an invalid value, such as a rank that ``comm`` does not have.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: the message has a different dtype or size than ``x``; raised on the receiver, by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
        >>> handle = mpi.recv_async(torch.zeros(2), source=left)
        >>> mpi.send(torch.ones(2), destination=right)
        tensor([1., 1.])
        >>> handle.wait()
        tensor([1., 1.])
    """


@blocking
def broadcast_object(
    obj: object, root: int = 0, *, comm: Communicator | None = None, flavour: str | None = None
) -> Any:
    """Return the object of ``root`` on every rank.

    Every rank of ``comm`` must make this call. Objects are sent as pickles, and unpickling can run arbitrary code, so
    use this call only among ranks that you trust. The call returns when this rank's part is complete. Other ranks may
    still be working.

    Args:
        obj (object): on ``root``, the object to send; ignored on other ranks.
        root (int): rank in ``comm`` whose object is sent; default 0, the same on every rank.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        ``obj`` itself on ``root``, a copy of it on other ranks.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different roots.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> mpi.broadcast_object({"lr": 0.1} if mpi.rank() == 0 else None)
        {'lr': 0.1}
    """
    call = Call("broadcast_object", comm, flavour)
    return call.of_object(obj, call.rank("root", root))


@asynchronous(broadcast_object)
def broadcast_object_async(
    obj: object, root: int = 0, *, comm: Communicator | None = None, flavour: str | None = None
) -> Handle[Any]:
    """Start to send the object of ``root`` to every rank.

    Asynchronous version of ``broadcast_object``: every rank of ``comm`` must make this call, which returns immediately.
    Objects are sent as pickles, and unpickling can run arbitrary code, so use this call only among ranks that you
    trust. All asynchronous calls, including calls on other communicators, must be in the same order on every rank.

    Args:
        obj (object): on ``root``, the object to send; ignored on other ranks.
        root (int): rank in ``comm`` whose object is sent; default 0, the same on every rank.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns the object of ``root``.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different roots; raised here or by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> handle = mpi.broadcast_object_async({"lr": 0.1} if mpi.rank() == 0 else None)
        >>> handle.wait()
        {'lr': 0.1}
    """


@blocking
def allgather_object(obj: object, *, comm: Communicator | None = None, flavour: str | None = None) -> list[Any]:
    """Return the objects of all ranks as a list, in rank order.

    Every rank of ``comm`` must make this call. Objects are sent as pickles, and unpickling can run arbitrary code, so
    use this call only among ranks that you trust. The call returns when this rank's part is complete. Other ranks may
    still be working.

    Args:
        obj (object): this rank's object.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        The list of the objects of all ranks.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different flavours.
        CollectiveTimeout: the call took longer than ``Tuning.deadline_seconds``, and ``Tuning.at_deadline`` is "raise".
        CommunicatorError: MPI failed, or another thread is in a collective on the same communicator.

    Examples:
        >>> names = mpi.allgather_object(f"rank {mpi.rank()}")
        >>> names == [f"rank {rank}" for rank in range(mpi.size())]
        True
    """
    return Call("allgather_object", comm, flavour).of_object(obj)


@asynchronous(allgather_object)
def allgather_object_async(
    obj: object, *, comm: Communicator | None = None, flavour: str | None = None
) -> Handle[list[Any]]:
    """Start to collect the objects of all ranks into a list, in rank order.

    Asynchronous version of ``allgather_object``: every rank of ``comm`` must make this call, which returns immediately.
    Objects are sent as pickles, and unpickling can run arbitrary code, so use this call only among ranks that you
    trust. All asynchronous calls, including calls on other communicators, must be in the same order on every rank.

    Args:
        obj (object): this rank's object.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.
        flavour (str): implementation to use, such as "mpi" or "shared"; default None, ``mpi.selector`` chooses.

    Returns:
        A handle whose ``wait()`` returns the list of the objects of all ranks.

    Raises:
        TypeError: an argument has the wrong type or an unknown name; raised before this rank sends anything.
        ValueError: an argument has an invalid value; raised before this rank sends anything.
        NotStarted: ``mpi.start()`` was not called.
        FlavourError: no flavour can carry out the call, or the requested ``flavour`` cannot.
        RanksDisagree: ranks of one node make different calls, or pass different flavours; raised here or by ``wait()``.
        CollectiveTimeout: a timeout expired; raised by ``wait()``. The operation is then still pending.
        CommunicatorError: MPI failed; raised here or by ``wait()``.

    Examples:
        >>> handle = mpi.allgather_object_async(f"rank {mpi.rank()}")
        >>> handle.wait() == [f"rank {rank}" for rank in range(mpi.size())]
        True
    """
