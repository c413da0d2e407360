"""The steps from the call of a collective to its operation.

``verbs.py`` has one function for each collective, which checks the arguments. This module has the remaining steps.
``resolve_output``, ``slice_out`` and ``gathered`` find flat memory to read and to write. ``Call`` finds or makes the
plan. The decorators ``blocking`` and ``asynchronous`` carry out or launch the operation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchmpi_py.collectives import kept_plans, numbers
from torchmpi_py.collectives.arrays import ArrayCall
from torchmpi_py.collectives.flavour import Gathering
from torchmpi_py.collectives.numbers import Number
from torchmpi_py.collectives.plan import Operation, Plan
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core import compiling
from torchmpi_py.core.collective import COLLECTIVES, Writes
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import Handle
from torchmpi_py.core.tensors import (
    OPS,
    Finish,
    check_divisible,
    check_known_op,
    check_out,
    check_rank,
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


def blocking(prepare: Callable[P, R]) -> Callable[P, R]:
    """Return a function that carries out the operation that ``prepare`` creates, and returns the result.

    The return annotation of ``prepare`` is the type of the result, not the type of the operation.
    """
    return _form(prepare, prepare, is_async=False)


def asynchronous(collective: Callable[P, R]) -> Callable[[Callable[P, Handle[R]]], Callable[P, Handle[R]]]:
    """Return a decorator that makes the asynchronous version of ``collective``.

    The asynchronous version launches the operation and returns a handle. The body of the decorated function never runs.
    """
    return functools.partial(_form, builder(collective), is_async=True)


def _form(prepare: Callable[P, Any], public: Callable[P, Any], *, is_async: bool) -> Callable[P, Any]:
    """Return the function that users call, with the name and the docstring of ``public``.

    ``x`` may be an array, but an ``obj`` is sent unchanged. The code path for tensors is the shortest. All steps are in
    a single function, because each nested function call would add overhead to every collective.
    """
    name, takes_tensors = prepare.__name__, "x" in inspect.signature(prepare).parameters
    keeps_plans, has_one_tensor = COLLECTIVES[name].keeps_plans, COLLECTIVES[name].writes is Writes.X

    @functools.wraps(public)
    def form(*args: P.args, **kwargs: P.kwargs) -> Any:
        arrays = key = operation = None
        try:
            x: Any = args[0] if args else kwargs.get("x")
            if takes_tensors and not isinstance(x, (Tensor, float, int)):
                arrays = ArrayCall(name, args, kwargs)
                x, args, kwargs = arrays.x, arrays.args, arrays.kwargs  # type: ignore[assignment]
            if keeps_plans and args and type(x) is Tensor:
                key = kept_plans.key_of(name, args, kwargs)
            if key is None:
                operation = prepare(*args, **kwargs)
                if takes_tensors and isinstance(x, Tensor):
                    cut_off(name, x, kwargs.get("out"))
            else:
                comm, out = resolve(kwargs.get("comm")), kwargs.get("out")  # type: ignore[arg-type]
                target: Any = x if out is None else out
                plan: Any = comm.plans.get(key)
                if plan is None:
                    operation = prepare(*args, **kwargs)
                    kept_plans.keep(comm, key, operation, (x, target))
                else:
                    increment_version(target)  # Autograd does not see that MPI writes to the target.
                    # ``detach`` keeps the memory of x alive, because the program may set x.data during the call.
                    tensors = (x,) if has_one_tensor else (x if out is None else x.detach(), target)
            if is_async:
                result: Any = (operation or Operation(plan, tensors, target)).launch()
            elif operation is None:
                result = plan.run(tensors, target)
            else:
                result = operation.plan.run(operation.arguments, operation.target, operation.conclude)
        except TypeError:
            _check_arguments(prepare, name, args, kwargs)
            raise
        return result if arrays is None else arrays.handle(result) if is_async else arrays.result(result)

    return _published(form, prepare)


def _published(form: Callable[P, Any], prepare: Callable[..., Any]) -> Callable[P, Any]:
    """Record ``prepare`` for ``builder``, and exclude ``form`` from torch.compile."""
    vars(form)["prepare"] = prepare
    compiling.leave_alone(form)
    return form


def _check_arguments(prepare: Callable[..., Any], call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError if the arguments do not match the parameters of the collective."""
    signature = inspect.signature(prepare)
    are = ", ".join(f"{x.name}=" if x.kind is x.KEYWORD_ONLY else x.name for x in signature.parameters.values())
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{call}: {error}; arguments: {are}") from None


def builder(collective: Callable[P, R]) -> Callable[P, Operation[R]]:
    """Return the function that prepares the operation of a collective, for callers that run operations themselves."""
    return vars(collective)["prepare"]  # type: ignore[no-any-return]


class Call:
    """A call of a collective on a communicator; ``flavour`` is the argument of the call, a name or None."""

    def __init__(self, name: str, comm: Communicator | None, flavour: str | None) -> None:
        self.name, self.comm, self.flavour = name, resolve(comm), flavour

    def rank(self, what: str, value: int) -> int:
        """Check that an argument is a rank of the communicator, and return it."""
        return check_rank(self.name, what, value, self.comm.size)

    def of_tensors(
        self, x: Tensor, tensors: tuple[Tensor, ...], others: tuple[Any, ...], target: Tensor, copy_out: Finish | None
    ) -> Any:
        """Return the operation on ``tensors``. The result is ``target``, after a call of ``copy_out``, if any.

        ``x`` is a tensor with the same size, device and kind of memory on all ranks. These properties determine the
        plan. ``others`` are the remaining arguments of the flavour's method, which are equal on all ranks.
        """
        device = _gpu(self.name, x) if x.is_cuda else None
        location = symmetric.find(x)
        plan = self._plan(x, others, device, symmetric=location is not None and location[0].is_declared)
        conclude = None if copy_out is None else functools.partial(_result, target, copy_out)
        return Operation(plan, tensors, target, conclude)

    def _plan(
        self, x: Tensor, others: tuple[Any, ...], device: torch.device | None, *, symmetric: bool, kind: Any = None
    ) -> Plan:
        """Return the plan for tensors like ``x``. The ranks compare size and dtype, or ``kind`` if it is set."""
        name, comm, num_bytes = self.name, self.comm, x.nbytes
        key = (name, self.flavour, selector.generation, x.dtype, num_bytes, x.device, others, symmetric, kind)
        if (plan := comm.plans.get(key)) is None:
            flavour = selector.flavour_for(name, comm, x.device, num_bytes, symmetric=symmetric, name=self.flavour)
            facts = (num_bytes, x.dtype, others) if kind is None else (kind, *others)
            plan = Plan(
                name=name, flavour=flavour, comm=comm, others=others, num_bytes=num_bytes, dtype=x.dtype, device=device,
                fingerprint=(name, flavour.name, *facts) if COLLECTIVES[name].is_compared else None,
            )  # fmt: skip
            kept_plans.add(comm, key, plan)
        return plan

    def of_rows(
        self, x: Tensor, buffer: Tensor | None, others: tuple[Any, ...], conclude: Callable[[Any], Any], out: Any
    ) -> Any:
        """Return the operation of a gather or allgather of tensors.

        ``x`` is this rank's flat input, and ``buffer`` is the flat output or None. ``conclude`` turns the flavour's
        result into the caller's result. The flavour is chosen after the ranks exchange their sizes. The choice ignores
        whether ``x`` is symmetric, because a rank may pass a tensor without rows, which has no address.
        """
        name = self.name
        choices = selector.choices(name, self.comm, x.device, symmetric=False, name=self.flavour)  # equal on all ranks
        plan = Plan(
            name=name, flavour=Gathering(self.flavour or "selector", choices.flavour_for), comm=self.comm,
            others=others, num_bytes=x.nbytes, dtype=x.dtype, device=_gpu(name, x) if x.is_cuda else None,
            fingerprint=(name, "tensors", "any-size", *others),
        )  # fmt: skip
        return Operation(plan, (x, buffer), out, conclude)

    def of_number(self, x: Number, *others: int) -> Any:
        """Return the operation that sends or receives a number as a record; ``others`` are the remaining arguments."""
        record = torch.frombuffer(bytearray(numbers.to_record(x)), dtype=torch.uint8)
        result = torch.empty_like(record) if self.name == "sendreceive" else record
        plan = self._plan(record, others, None, symmetric=False, kind="number")
        arguments = (record,) if result is record else (record, result)
        return Operation(plan, arguments, None, lambda _: numbers.from_records(result.numpy().tobytes())[0])

    def of_numbers(
        self, x: Number, out: object, others: tuple[Any, ...], conclude: Callable[[list[Number]], Any]
    ) -> Any:
        """Return the operation that exchanges numbers; ``conclude`` computes the result from the numbers of all ranks.

        ``others`` are the remaining arguments of the call, which are equal on all ranks.
        """
        if out is not None:
            raise TypeError(f"{self.name}: out= cannot be used when x is a number; omit out=, or pass x as a tensor")
        name, comm = self.name, self.comm
        key = (name, self.flavour, selector.generation, "numbers", others)
        if (plan := comm.plans.get(key)) is None:
            selector.check_flavour(name, self.flavour)
            plan = Plan(
                name=name, method="exchange", flavour=numbers.Records(), comm=comm,
                num_bytes=numbers.RECORD_BYTES, fingerprint=(name, "mpi", "number", *others),
            )  # fmt: skip
            kept_plans.add(comm, key, plan)
        return Operation(plan, (numbers.to_record(x),), None, conclude)

    def reduced(self, x: Number, out: object, op: str, root: int | None = None) -> Any:
        """Return the operation of a reduce or allreduce of numbers: an allgather of records, reduced on each rank.

        With ``root``, every other rank returns its own ``x``.
        """
        if op not in OPS:  # This test saves a function call for valid ops.
            check_known_op(self.name, op)

        def conclude(values: list[Number]) -> Number:
            result = numbers.reduce_numbers(self.name, op, values)
            return result if root in (None, self.comm.rank) else x

        return self.of_numbers(x, out, (op,) if root is None else (op, root), conclude)

    def of_object(self, obj: object, *others: Any) -> Any:
        """Return the operation on a Python object, which is sent as a pickle."""
        name = self.name
        flavour = selector.flavour_for(name, self.comm, _CPU, 0, symmetric=False, name=self.flavour)
        fingerprint = (name, flavour.name, "object", *others)
        plan = Plan(name=name, flavour=flavour, comm=self.comm, others=others, fingerprint=fingerprint)
        return Operation(plan, (obj,), None, lambda result: result)


def resolve_output(
    verb: str, x: Tensor, out: object, shape: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Finish | None]:
    """Return (source, buffer, target, copy_out) for a result in ``out``, or in ``x`` if ``out`` is None.

    A flavour reads ``source`` and writes ``buffer``, both flat. Then ``copy_out``, if any, copies the buffer into
    ``target``. The result has ``shape``; the default is the shape of ``x``.
    """
    if out is None or (out is x and shape is None):
        buffer, copy_out = output_buffer(verb, x, holds_input=True)
        return buffer, buffer, x, copy_out
    target = check_out(verb, out, x, x.shape if shape is None else shape)
    buffer, copy_out = output_buffer(verb, target, holds_input=False)
    return copy_if_overlapping(flat(x), buffer, buffer), buffer, target, copy_out


def slice_out(verb: str, x: Tensor, out: object, size: int) -> tuple[Tensor, Tensor, Tensor, Finish | None]:
    """Return (source, buffer, target, copy_out) for a result with the shape of one of the ``size`` slices of ``x``.

    The tuple is as in ``resolve_output``. If ``out`` is None, the target is a new tensor.
    """
    check_divisible(verb, x, size)
    shape = (x.shape[0] // size, *x.shape[1:])
    return resolve_output(verb, x, x.new_empty(shape, requires_grad=False) if out is None else out, shape)


def gathered(verb: str, value: object, out: object) -> tuple[Tensor, Tensor | None, Callable[[Tensor | None], Any]]:
    """Return (source, buffer, conclude) for a result whose shape depends on the sizes of all ranks.

    ``source`` is the flat input. ``buffer`` is the flat output, or None if ``out`` is None. ``conclude`` turns the
    flavour's result into the caller's result.
    """
    x = check_tensor(verb, "x", value)
    source = flat(x if x.dim() else x.reshape(1))
    if out is None:
        return source, None, lambda result: result
    target = check_out(verb, out, x, None)
    buffer, copy_out = output_buffer(verb, target, holds_input=False)
    return source, buffer, functools.partial(_result, target, copy_out)


def _result(target: Tensor, copy_out: Finish | None, _: object) -> Tensor:
    """Return ``target``, after ``copy_out``, if any, has copied the flavour's buffer into it."""
    if copy_out is not None:
        copy_out()
    return target


def _gpu(verb: str, x: Tensor) -> torch.device:
    """Return the device of ``x``. Raise RuntimeError while a CUDA graph is being captured."""
    if devices.of(x.device).is_capturing():
        raise RuntimeError(
            f"{verb}: a collective cannot be part of a CUDA graph, because the ranks synchronize on the host; call it "
            "before or after the part that torch.cuda.graph captures"
        )
    return x.device
