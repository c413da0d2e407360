"""Turn the calls of a process group into operations of the package on flat tensors.

The idea: torch.distributed passes lists with one tensor per rank, but the package's collectives take one flat tensor
with the parts of all ranks. So a call copies its lists into a flat tensor before the operation, or copies the parts out
of a flat tensor in a last step. Tensors that are contiguous and not in lists are used in place.

An alternative is one message or one broadcast per list element, directly from and into the user's tensors, without
copies. Only large gathers and scatters use messages (``ExtraOperations.takes``). In all other calls, a collective on
one flat tensor needs fewer messages, and one operation is easier to compare between ranks than many.

Each function that returns a ``Call`` checks its tensors on this rank only, and raises ValueError or TypeError.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.flavour import Sizes
from torchmpi_py.collectives.plan import Operation, Plan
from torchmpi_py.collectives.prepare import builder
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import (
    WHOLE_NUMBERS,
    Finish,
    check_divisible,
    check_parts,
    check_rank,
    check_tensor,
    copy_if_overlapping,
    flat,
    output_buffer,
)
from torchmpi_py.torch_backend.call_queue import Call
from torchmpi_py.torch_backend.extra_operations import ExtraOperations, apart
from torchmpi_py.torch_backend.list_checks import Tensors, check_list, check_whole, rows

_broadcast = builder(verbs.broadcast)
_allreduce = builder(verbs.allreduce)
_reduce = builder(verbs.reduce)
_reduce_scatter = builder(verbs.reduce_scatter)
_alltoall = builder(verbs.alltoall)
_scatter = builder(verbs.scatter)


class GroupReduction(NamedTuple):
    """A reduction: the package's name of the op, and the factor that first multiplies each tensor, or None."""

    op: str
    factor: Any

    def scaled(self, x: Tensor) -> Tensor:
        """Return a copy of ``x`` times the factor, or ``x`` itself if there is no factor.

        Raise ValueError if the products do not fit the dtype or shape of ``x``.
        """
        if self.factor is None:
            return x
        try:
            return x.detach().clone().mul_(self.factor)
        except RuntimeError as error:
            raise ValueError(
                f"premul_sum: {x.dtype} of shape {tuple(x.shape)} cannot be multiplied by {self.factor!r}: {error}. "
                "Pass a factor that fits the tensor, or pass x.float()"
            ) from None

    def operation(
        self, build: Callable[..., Operation[Any]], extra: ExtraOperations, x: Tensor, *root: int, out: Tensor | None
    ) -> Operation[Any]:
        """Return the operation that reduces ``x``. Unlike the collectives, it can also compute a mean of integers.

        ``build`` creates the operation of a collective. If the collective has a root, pass ``root``.
        """
        is_mean_of_whole = self.op == "avg" and x.dtype in WHOLE_NUMBERS
        op = "sum" if is_mean_of_whole else self.op
        operation = build(x, *root, out=out, op=op, comm=extra.comm)
        return extra.mean_of_whole(operation) if is_mean_of_whole else operation


def _into_lists(wholes: Tensors, lists: Sequence[Tensors]) -> Callable[[], None]:
    """Return the last step of a call: a function that copies each flat tensor into the tensors of its list."""

    def conclude() -> None:
        with torch.no_grad():
            for whole, parts in zip(wholes, lists, strict=True):
                for piece, part in zip(torch.split(whole, [x.numel() for x in parts]), parts, strict=True):
                    part.detach().copy_(piece.view(part.shape))

    return conclude


def _buffers(verb: str, outputs: Tensors) -> tuple[list[Tensor], list[Finish]]:
    """Return a contiguous buffer for each output, and last steps that copy from buffers to non-contiguous outputs."""
    targets = [output_buffer(verb, output, holds_input=False) for output in outputs]
    return [buffer for buffer, _ in targets], [copy_out for _, copy_out in targets if copy_out]


def warn_in_backward(verb: str, x: Tensor) -> None:
    """Make ``backward`` warn if it passes through a tensor that a call overwrites, as torch's own backends do.

    The package's collectives raise an error in this case. A process group only warns, because programs that use
    torch.distributed deliberately add up their losses in this way.
    """
    # Overwriting a leaf (a parameter) is intended, so do not warn.
    is_leaf = x.is_leaf if x._base is None else x._base.is_leaf
    if is_leaf or not torch.is_grad_enabled():
        return

    def warn(_: Tensor) -> None:
        warnings.warn(
            f"backward() passes through a tensor that torch.distributed's {verb} has overwritten, so gradients may "
            "be wrong; use torch.distributed.nn.functional, or pass x.detach()",
            stacklevel=1,
        )

    x.register_hook(warn)  # type: ignore[no-untyped-call]


def allreduce(extra: ExtraOperations, tensors: list[Tensor], reduction: GroupReduction) -> Call:
    """Return the allreduce of each tensor, dense or sparse, in a separate operation."""
    if any(x.is_sparse for x in tensors):
        return _allreduce_sparse(extra, tensors, reduction)
    operations = [reduction.operation(_allreduce, extra, reduction.scaled(x), out=x) for x in tensors]
    return operations, tensors, ()


def _allreduce_sparse(extra: ExtraOperations, tensors: list[Tensor], reduction: GroupReduction) -> Call:
    if reduction.op != "sum":
        raise ValueError(
            f"all_reduce: only the sum of sparse tensors is defined, found op {reduction.op!r}; use SUM or x.to_dense()"
        )
    totals: list[Tensor] = []

    def conclude() -> None:
        with torch.no_grad():  # Write to x itself: a copy into x.detach() would not change x.
            for x, total in zip(tensors, totals, strict=True):
                base = x._base
                if base is not None and base.is_sparse and base.is_complex() and not x.is_complex():
                    base.copy_(torch.view_as_complex(total))  # Here x is torch's real view of the program's tensor.
                else:
                    x.copy_(total)

    return [extra.operation("sparse", reduction.scaled(x), keep=totals.append) for x in tensors], tensors, [conclude]


def allreduce_together(extra: ExtraOperations, tensors: list[Tensor], reduction: GroupReduction) -> Call:
    """Return the allreduce of all tensors, in one operation for each dtype and device."""
    check_parts("all_reduce", "tensors", tensors)
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    # Make one flat tensor for each dtype and device. The last step copies the results back.
    wholes = [torch.cat([flat(reduction.scaled(x)).view(-1) for x in alike]) for alike in kinds.values()]
    operations = [reduction.operation(_allreduce, extra, whole, out=whole) for whole in wholes]
    return operations, tensors, [_into_lists(wholes, list(kinds.values()))]


def broadcast(comm: Communicator, tensors: list[Tensor], root: int) -> Call:
    """Return the broadcast of each tensor in a separate operation."""
    return [_broadcast(x, root, comm=comm) for x in tensors], tensors, ()


def reduce(extra: ExtraOperations, tensors: list[Tensor], root: int, reduction: GroupReduction) -> Call:
    """Return the reduce of each tensor in a separate operation. Only root's tensors are written."""
    operations = [reduction.operation(_reduce, extra, reduction.scaled(x), root, out=x) for x in tensors]
    return operations, tensors, ()


def allgather(comm: Communicator, output_lists: Sequence[Tensors], inputs: Tensors) -> Call:
    """Return the allgather of each input into a list of outputs. The shapes may differ between ranks."""
    operations, wholes = [], []
    for outputs, x in zip(output_lists, inputs, strict=True):
        check_list("all_gather", "outputs", outputs, x, comm.size, of_equal_size=[comm.rank])
        whole = x.new_empty(sum(y.numel() for y in outputs), requires_grad=False)
        operations.append(_gathering(comm, flat(x).view(-1), whole, [y.numel() for y in outputs]))
        wholes.append(whole)
    return operations, [y for outputs in output_lists for y in outputs], [_into_lists(wholes, output_lists)]


def allgather_single(comm: Communicator, outputs: Tensors, inputs: Tensors) -> Call:
    """Return the allgather of each input into one output, in rank order."""
    for output, x in zip(outputs, inputs, strict=True):
        check_whole("all_gather", "output", output, "input", x, comm.size)
    buffers, copies_out = _buffers("all_gather", outputs)
    sources = _apart([flat(x).view(-1) for x in inputs], buffers)
    operations = []
    for source, buffer in zip(sources, buffers, strict=True):
        whole = buffer.view(-1)
        slot = whole[comm.rank * source.numel() :][: source.numel()]
        source = copy_if_overlapping(source, whole, slot)  # FSDP passes the slot as input.
        operations.append(_gathering(comm, source, whole, [source.numel()] * comm.size))
    return operations, list(outputs), copies_out


def gather(extra: ExtraOperations, output_lists: Sequence[Tensors], x: Tensor, root: int) -> Call:
    """Return the gather of the inputs of all ranks into a list on root. All inputs must have the same size."""
    comm, outputs, whole = extra.comm, [], None
    check_rank("gather", "dst", root, comm.size)
    source = flat(check_tensor("gather", "input", x)).view(-1)
    if comm.rank == root:
        outputs = list(output_lists[0])
        check_list("gather", "outputs", outputs, x, comm.size, of_equal_size=range(comm.size))
    if extra.takes("gather", x):
        buffers, copies_out = _buffers("gather", outputs)
        return [extra.with_root("gather", source, [y.view(-1) for y in buffers], root)], outputs, copies_out
    if comm.rank == root:
        whole = x.new_empty(comm.size * x.numel(), requires_grad=False)
    operation = _gathering(comm, source, whole, [x.numel()] * comm.size, root)
    return [operation], outputs, () if whole is None else [_into_lists([whole], output_lists)]


def scatter(extra: ExtraOperations, output: Tensor, input_lists: Sequence[Tensors], root: int) -> Call:
    """Return the scatter of root's list of tensors to all ranks. All tensors must have the same size."""
    comm, inputs = extra.comm, []
    check_rank("scatter", "src", root, comm.size)
    check_tensor("scatter", "output", output)
    (buffer,), copies_out = _buffers("scatter", [output])
    if comm.rank == root:
        check_list("scatter", "inputs", input_lists[0], output, comm.size, of_equal_size=range(comm.size))
        inputs = [flat(x).view(-1) for x in input_lists[0]]
    if extra.takes("scatter", output):
        return [extra.with_root("scatter", buffer.view(-1), inputs, root)], [output], copies_out
    whole = torch.cat(inputs) if inputs else buffer.new_empty(comm.size * buffer.numel())
    return [_scatter(whole, root, out=buffer.view(-1), comm=comm)], [output], copies_out


def reduce_scatter(
    extra: ExtraOperations, outputs: Tensors, input_lists: Sequence[Tensors], reduction: GroupReduction
) -> Call:
    """Return the reduction of each list over the ranks: rank r gets the r-th tensor. Shapes in a list may differ."""
    comm, operations = extra.comm, []
    for output, parts in zip(outputs, input_lists, strict=True):
        check_list("reduce_scatter", "inputs", parts, output, comm.size, of_equal_size=[comm.rank])
    buffers, copies_out = _buffers("reduce_scatter", outputs)
    for buffer, parts in zip(buffers, input_lists, strict=True):
        inputs = [flat(reduction.scaled(x)).view(-1) for x in parts]
        if len({x.numel() for x in inputs}) == 1:  # Unequal sizes need a reduce for each rank.
            operations.append(reduction.operation(_reduce_scatter, extra, torch.cat(inputs), out=buffer.view(-1)))
        else:
            for rank, x in enumerate(apart(inputs, buffers)):
                target = buffer.view(-1) if rank == comm.rank else None
                operations.append(reduction.operation(_reduce, extra, x, rank, out=target))
    return operations, list(outputs), copies_out


def reduce_scatter_single(extra: ExtraOperations, outputs: Tensors, inputs: Tensors, reduction: GroupReduction) -> Call:
    """Return the reduction of each input over the ranks: rank r gets the r-th part."""
    for output, x in zip(outputs, inputs, strict=True):
        check_whole("reduce_scatter", "input", x, "output", output, extra.comm.size)
    buffers, copies_out = _buffers("reduce_scatter", outputs)
    sources = _apart([flat(reduction.scaled(x)).view(-1) for x in inputs], buffers)
    operations = [
        reduction.operation(_reduce_scatter, extra, source, out=buffer.view(-1))
        for source, buffer in zip(sources, buffers, strict=True)
    ]
    return operations, list(outputs), copies_out


def alltoall_single(
    extra: ExtraOperations, output: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]
) -> Call:
    """Return the alltoall of one tensor's parts along dim 0.

    The splits list the number of rows of each part. If both lists are empty, all parts are equal.
    """
    size = extra.comm.size
    if not output_splits and not input_splits:
        check_divisible("all_to_all_single", x, size)
        check_whole("all_to_all_single", "output", output, "input", x, 1)
        (buffer,), copies_out = _buffers("all_to_all_single", [output])
        return [_alltoall(flat(x).view(-1), out=buffer.view(-1), comm=extra.comm)], [output], copies_out
    check_list("all_to_all_single", "outputs", [output], x, 1)
    (buffer,), copies_out = _buffers("all_to_all_single", [output])
    sent = rows("input", flat(x), input_splits, size)
    received = rows("output", buffer, output_splits, size)
    rank = extra.comm.rank
    check_list("all_to_all_single", "outputs", received, sent[rank], size, of_equal_size=[rank])
    return [extra.alltoall_operation(received, sent)], [output], copies_out


def alltoall(extra: ExtraOperations, outputs: Tensors, inputs: Tensors) -> Call:
    """Return the alltoall of lists with one tensor per rank. Sizes must match only between sender and receiver."""
    rank, size = extra.comm.rank, extra.comm.size
    check_list("all_to_all", "inputs", inputs, next(iter(inputs), None), size)
    check_list("all_to_all", "outputs", outputs, inputs[rank], size, of_equal_size=[rank])
    buffers, copies_out = _buffers("all_to_all", outputs)
    return [extra.alltoall_operation(buffers, list(inputs))], list(outputs), copies_out


def _apart(sources: list[Tensor], buffers: list[Tensor]) -> list[Tensor]:
    """Return ``sources``, with a copy in place of each source that overlaps another source's buffer.

    The operations run one after another, so an earlier operation could overwrite the source of a later one.
    """
    if len(sources) == 1:
        return sources
    return [apart([x], buffers[:number] + buffers[number + 1 :])[0] for number, x in enumerate(sources)]


def _gathering(comm: Communicator, x: Tensor, whole: Tensor | None, counts: list[int], *root: int) -> Operation[Any]:
    """Return an allgather of flat tensors, or a gather if ``root`` is passed.

    ``counts`` lists the number of elements of each rank, and is the same on all ranks. The result is written to
    ``whole``, which is None on ranks that receive nothing.
    """
    sizes = Sizes(counts, [count * x.itemsize for count in counts], [0] * comm.size)
    verb = "gather" if root else "allgather"
    num_bytes = sum(sizes.num_bytes)
    resolve(comm)
    flavour = selector.flavour_for(verb, comm, x.device, num_bytes, symmetric=False, name=None)
    # If the sizes differ, compare the whole list, because different lists can have the same sum.
    compared = num_bytes if len(set(counts)) == 1 else zlib.crc32(repr(counts).encode())
    plan = Plan(
        name=verb, flavour=flavour, comm=comm, others=(*root, sizes), num_bytes=num_bytes, dtype=x.dtype,
        device=x.device if x.is_cuda else None, fingerprint=(verb, flavour.name, compared, x.dtype, *root),
    )  # fmt: skip
    return Operation(plan, (x, whole), whole)
