"""The way of a verb's call to an Operation.

``verbs.py`` has one function per verb, which checks the arguments. The functions here do the rest: they find flat
memory to read and to write (``resolve_output`` and its neighbours), choose the flavour and build the Operation
(``tensor_operation`` and its neighbours), and make the blocking and the asynchronous form of the verb
(``blocking_and_async``).
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchmpi_py.collectives import kept_operations, numbers
from torchmpi_py.collectives.arrays import ArrayCall
from torchmpi_py.collectives.flavour import Gathering, Sizes
from torchmpi_py.collectives.kept_operations import KeptOperation
from torchmpi_py.collectives.numbers import Number
from torchmpi_py.collectives.operation import Operation
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core import compiling
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import Handle
from torchmpi_py.core.tensors import (
    Finish,
    check_divisible,
    check_known_op,
    check_out,
    check_tensor,
    copy_if_overlapping,
    cut_off,
    flat,
    output_buffer,
)
from torchmpi_py.memory import devices, symmetric

P = ParamSpec("P")
R = TypeVar("R")
_CPU = torch.device("cpu")

_OF_PARAMETERS = {
    "op": "op: sum, avg, prod, min, max, band, bor, bxor, land or lor.",
    "comm": "comm: the communicator whose ranks make this call, alike and in one order; default: the current level.",
    "flavour": 'flavour: the way to carry the call out, as "mpi" or "shared"; default: what mpi.selector chooses.',
}
_OF_BLOCKING = "Returns when this rank's part is done; the other ranks may still be at work."
_OF_ASYNC = """\
Returns a Handle at once; handle.wait() returns the result, or raises what the operation has raised. Until the operation
is complete its tensors must not be touched."""
_OF_MESSAGES = """\
comm: the communicator in which the other rank is counted; default: the current level. Only the ranks named call.
flavour: the way to carry the call out; default: what mpi.selector chooses."""
_OF_ERRORS = """\
Raises TypeError or ValueError for a wrong argument, on every rank before anything is sent; NotStarted before mpi.start;
FlavourError where no flavour can carry the call out; RanksDisagree where ranks of one node make different calls;
CollectiveTimeout at the deadline, with Tuning.at_deadline="raise"; CommunicatorError if MPI fails."""

_OF_MESSAGES_ERRORS = """\
Raises TypeError or ValueError for a wrong argument, before anything is sent; NotStarted before mpi.start; FlavourError
where no flavour can carry the call out; CollectiveTimeout at the deadline, with Tuning.at_deadline="raise";
CommunicatorError if MPI fails; RanksDisagree, on the receiver, if the message has another dtype or size. A call without
its counterpart waits until the deadline."""

_TENSORS_BEFORE_OTHERS = {"broadcast": 1, "allreduce": 2, "reduce": 2, "reduce_scatter": 2, "scatter": 2, "alltoall": 2}
"""For each verb that all ranks call alike, how many of the flavour's arguments are tensors; those come first."""


def blocking_and_async(prepare: Callable[P, Operation[R]]) -> tuple[Callable[P, R], Callable[P, Handle[R]]]:
    """(blocking, asynchronous) form of the verb that ``prepare`` prepares.

    An ``x`` may be an array, an ``obj`` is sent as it is. Tensors take the short way: every call of a verb passes here.
    """
    name = prepare.__name__.lstrip("_")
    blocking = _form(prepare, name, operator.methodcaller("run"), ArrayCall.result, KeptOperation.to_run)
    asynchronous = _form(prepare, name, operator.methodcaller("launch"), ArrayCall.handle, KeptOperation.to_launch)
    result = str(inspect.signature(prepare).return_annotation).removeprefix("Operation[").removesuffix("]")
    compiling.leave_alone(blocking, asynchronous)
    _present(blocking, prepare, name, result, _OF_BLOCKING)
    _present(asynchronous, prepare, f"{name}_async", f"Handle[{result}]", _OF_ASYNC)
    return blocking, asynchronous


def _form(
    prepare: Callable[P, Operation[R]],
    name: str,
    end: Callable[[Operation[R]], Any],
    for_arrays: Callable[[ArrayCall, Any], Any],
    again: Callable[[KeptOperation, Tensor], Operation[Any]],
) -> Callable[P, Any]:
    """A form of verb ``name``: ``end`` runs or launches the operation; ``for_arrays`` makes the result for arrays.

    ``again`` makes the operation of another call alike.
    """
    takes_tensors, keeps = "x" in inspect.signature(prepare).parameters, name in kept_operations.VERBS

    @functools.wraps(prepare)
    def form(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            if takes_tensors:
                x: Any = args[0] if args else kwargs.get("x")
                if not isinstance(x, Tensor):
                    call = ArrayCall(name, args, kwargs)
                    return for_arrays(call, end(prepare(*call.args, **call.kwargs)))
                if keeps and args and (key := kept_operations.key_of(name, args, kwargs)) is not None:
                    comm = resolve(kwargs.get("comm") if kwargs else None)  # type: ignore[arg-type]
                    if (kept := comm.kept.pop(key, None)) is None:
                        operation = prepare(*args, **kwargs)
                        kept_operations.keep(comm, key, operation)
                        return end(operation)
                    result = end(again(kept, x))
                    kept_operations.put_back(comm, key, kept)
                    return result
                if x.requires_grad or "out" in kwargs:
                    operation = prepare(*args, **kwargs)
                    cut_off(name, x, kwargs.get("out"))
                    return end(operation)
            return end(prepare(*args, **kwargs))
        except TypeError:
            _check_arguments(prepare, name, args, kwargs)
            raise

    return form


def _check_arguments(prepare: Callable[..., Any], call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """TypeError for arguments that the verb does not take, or that do not fit otherwise."""
    signature = inspect.signature(prepare)
    are = ", ".join(f"{x.name}=" if x.kind is x.KEYWORD_ONLY else x.name for x in signature.parameters.values())
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{call}: {error}; arguments are: {are}") from None


def builder(verb: Callable[P, R]) -> Callable[P, Operation[R]]:
    """The function that prepares the operation of a verb; torch_backend runs such operations in its own order."""
    prepare: Callable[P, Operation[R]] = inspect.unwrap(verb)
    return prepare


def _present(form: Any, prepare: Callable[..., Any], name: str, result: str, promise: str) -> None:
    """Give a form of a verb what ``help()`` shows: name, signature, and the whole contract."""
    known = inspect.signature(prepare).parameters
    parameters = "\n".join(text for parameter, text in _OF_PARAMETERS.items() if parameter in known)
    errors = _OF_ERRORS
    if known.keys() & {"source", "destination"}:
        parameters, errors = _OF_MESSAGES, _OF_MESSAGES_ERRORS
    form.__name__ = form.__qualname__ = name
    form.__doc__ = "\n\n".join([inspect.cleandoc(prepare.__doc__ or ""), parameters, promise, errors])
    form.__annotations__ = {**prepare.__annotations__, "return": result}
    form.__signature__ = inspect.signature(prepare).replace(return_annotation=result)


def tensor_operation(
    verb: str,
    comm: Communicator,
    flavour: str | None,
    x: Tensor,
    arguments: tuple[Any, ...],
    target: Tensor,
    copy_out: Finish | None,
) -> Operation[Any]:
    """The operation whose result is ``target``, after ``copy_out``.

    Size, device and kind of memory are those of ``x``, the tensor that the user gave, which is alike on all ranks.
    """
    conclude = None if copy_out is None else functools.partial(_result, target, copy_out)
    num_bytes = x.nbytes
    found = symmetric.find(x)
    is_symmetric = found is not None and found[0].is_declared
    served = selector.flavour_for(verb, comm, x.device, num_bytes, symmetric=is_symmetric, name=flavour)
    device = _gpu(verb, x) if x.is_cuda else None
    num_tensors = _TENSORS_BEFORE_OTHERS.get(verb)
    fingerprint = None if num_tensors is None else (verb, served.name, num_bytes, x.dtype, arguments[num_tensors:])
    return Operation(
        verb, verb, served, comm, arguments, conclude, num_bytes, target, device=device, fingerprint=fingerprint
    )


def gather_operation(
    verb: str,
    comm: Communicator,
    flavour: str | None,
    x: Tensor,
    out: object,
    arguments: tuple[Any, ...],
    conclude: Callable[[Any], Any],
) -> Operation[Any]:
    """The (all)gather of tensors, whose flavour is chosen after the ranks exchange their sizes.

    Whether ``x`` is symmetric does not count: a tensor of no rows, which one rank may bring, has no address.
    """
    plan = selector.plan(verb, comm, x.device, symmetric=False, name=flavour)  # as it is at launch, on all ranks
    served: Any = Gathering(flavour or "selector", plan.flavour_for)
    device = _gpu(verb, x) if x.is_cuda else None
    fingerprint = (verb, "tensors", "any-size", *arguments[2:])
    return Operation(
        verb, verb, served, comm, arguments, conclude, x.nbytes, out, device=device, fingerprint=fingerprint
    )


def number_operation(verb: str, comm: Communicator, flavour: str | None, x: Number, *others: int) -> Operation[Any]:
    """The operation on the record of a number; ``others`` are the verb's other arguments. The result is a number."""
    record = numbers.to_record(x)
    result = torch.empty_like(record) if verb == "sendreceive" else record
    arguments = (record, *others) if result is record else (record, result, *others)
    served = selector.flavour_for(verb, comm, _CPU, numbers.RECORD_BYTES, symmetric=False, name=flavour)
    fingerprint = (verb, served.name, "number", *others) if verb in _TENSORS_BEFORE_OTHERS else None

    def conclude(_: object) -> Number:
        return numbers.from_record(result)

    return Operation(verb, verb, served, comm, arguments, conclude, numbers.RECORD_BYTES, fingerprint=fingerprint)


def gathered_numbers(
    verb: str,
    comm: Communicator,
    flavour: str | None,
    x: Number,
    conclude: Callable[[list[Number]], Any],
    others: tuple[Any, ...] = (),
) -> Operation[Any]:
    """The allgather of records, all of one size, whose numbers ``conclude`` turns into the result.

    ``others`` are the verb's other arguments, which are the same on all ranks.
    """
    record = numbers.to_record(x)
    records = record.new_empty((comm.size, numbers.RECORD_BYTES))
    sizes = Sizes.equal(record, comm.size)
    served = selector.flavour_for("allgather", comm, _CPU, records.nbytes, symmetric=False, name=flavour)
    return Operation(
        verb,
        "allgather",
        served,
        comm,
        (record, records, sizes),
        lambda _: conclude(numbers.from_records(records)),
        numbers.RECORD_BYTES,
        fingerprint=(verb, served.name, "number", *others),
    )


def reduced_number(
    verb: str, x: Number, out: object, op: str, comm: Communicator, flavour: str | None, root: int | None
) -> Operation[Any]:
    """(all)reduce of numbers: an allgather of records, reduced on each rank. With a root, the others keep ``x``."""
    no_out(verb, out)
    check_known_op(verb, op)

    def conclude(values: list[Number]) -> Number:
        result = numbers.reduce_numbers(verb, op, values)
        return result if root in (None, comm.rank) else x

    return gathered_numbers(verb, comm, flavour, x, conclude, (op,) if root is None else (op, root))


def object_operation(verb: str, comm: Communicator, flavour: str | None, arguments: tuple[Any, ...]) -> Operation[Any]:
    """The operation on Python objects, which travel by pickle."""
    served = selector.flavour_for(verb, comm, _CPU, 0, symmetric=False, name=flavour)
    fingerprint = (verb, served.name, "object", *arguments[1:])
    return Operation(verb, verb, served, comm, arguments, lambda got: got, 0, fingerprint=fingerprint)


def no_out(verb: str, out: object) -> None:
    """Raise a TypeError if ``out`` is given with a number."""
    if out is not None:
        raise TypeError(f"{verb}: a number is returned, not written; leave out= away, or pass x as a tensor")


def resolve_output(
    verb: str, x: Tensor, out: object, shape: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Finish | None]:
    """(source, buffer, target, copy_out) for a result of ``shape`` (default: x's) in ``out``, or in ``x`` itself.

    A flavour reads ``source`` and writes ``buffer``, both flat; ``copy_out``, if any, then fills the ``target``.
    """
    if out is None or (out is x and shape is None):
        buffer, copy_out = output_buffer(verb, x, holds_input=True)
        return buffer, buffer, x, copy_out
    target = check_out(verb, out, x, x.shape if shape is None else shape)
    buffer, copy_out = output_buffer(verb, target, holds_input=False)
    return copy_if_overlapping(flat(x), buffer, buffer), buffer, target, copy_out


def slice_out(verb: str, x: Tensor, out: object, size: int) -> tuple[Tensor, Tensor, Tensor, Finish | None]:
    """(source, buffer, target, copy_out) for a result that is one of ``size`` slices of ``x``; new without ``out``."""
    check_divisible(verb, x, size)
    shape = (x.shape[0] // size, *x.shape[1:])
    return resolve_output(verb, x, x.new_empty(shape, requires_grad=False) if out is None else out, shape)


def gathered(verb: str, given: object, out: object) -> tuple[Tensor, Tensor | None, Callable[[Tensor | None], Any]]:
    """(source, buffer or None, conclude) for a result whose shape is known after the ranks exchange their sizes."""
    x = check_tensor(verb, "x", given)
    source = flat(x if x.dim() else x.reshape(1))
    if out is None:
        return source, None, lambda got: got
    target = check_out(verb, out, x, None)
    buffer, copy_out = output_buffer(verb, target, holds_input=False)
    return source, buffer, functools.partial(_result, target, copy_out)


def _result(target: Tensor, copy_out: Finish | None, _: object) -> Tensor:
    """``target``, after ``copy_out`` has filled it from the buffer that the flavour wrote."""
    if copy_out is not None:
        copy_out()
    return target


def _gpu(verb: str, x: Tensor) -> torch.device:
    """The device of ``x``. RuntimeError while a CUDA graph is being captured."""
    if devices.of(x.device).is_capturing():
        raise RuntimeError(
            f"{verb}: a CUDA graph is being captured, and a collective cannot be part of one: the ranks meet on the "
            "host. Call it before or after the part that torch.cuda.graph captures"
        )
    return x.device
