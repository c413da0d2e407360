"""The process group: torch.distributed's calls, carried out by the package's collectives.

torch.distributed passes lists of tensors, and has several functions for the same collective. Each call becomes one or
more operations on flat tensors (``group_calls.py``). A queue carries the calls out in their order (``call_queue.py``).
Point-to-point messages do not queue (``p2p.py``). Importing this module prepares torch for groups of this class.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.weak import WeakTensorKeyDictionary

from torchmpi_py.collectives import kept_plans, verbs
from torchmpi_py.collectives.prepare import builder
from torchmpi_py.core import communication_thread, communicators, compiling, config
from torchmpi_py.core.tensors import WHOLE_NUMBERS
from torchmpi_py.errors import CommunicatorError
from torchmpi_py.memory import symmetric
from torchmpi_py.torch_backend import communicator_pool, ddp_buckets, group_calls, p2p, torch_internals
from torchmpi_py.torch_backend.backend_name import NAME
from torchmpi_py.torch_backend.call_queue import Call, CallQueue, QueuedCall
from torchmpi_py.torch_backend.extra_operations import ExtraOperations
from torchmpi_py.torch_backend.group_calls import GroupReduction
from torchmpi_py.torch_backend.list_checks import Tensors
from torchmpi_py.torch_backend.p2p import Message
from torchmpi_py.torch_backend.work import OVER, CallWork, Done, PendingWork, Several, callback_state

_OPS = {kind: kind.lower() for kind in ("SUM", "AVG", "MIN", "MAX", "BAND", "BOR", "BXOR")}
_OPS |= {"PRODUCT": "prod", "PREMUL_SUM": "sum"}
_KINDS: Any = distributed.ReduceOp.RedOpType
_BY_NUMBER = {_KINDS.__members__[name].value: GroupReduction(op, None) for name, op in _OPS.items()}
_PREMUL_SUM = _KINDS.PREMUL_SUM.value  # Numbers are compared, because torch's enumerations are slow.
_allreduce = builder(verbs.allreduce)
# The type is Any, because torch declares several signatures for each method, and our methods accept all of them.
_Base: Any = distributed.ProcessGroup


class ProcessGroup(_Base):  # type: ignore[misc]
    """A process group of torch.distributed, with its own communicator.

    Do not call this constructor. To create a group, call ``dist.init_process_group("torchmpi")`` or ``dist.new_group``,
    which call it on all ranks of the group. The collectives behave as documented by torch.distributed. With a
    ``timeout`` other than torch's default, a wait that takes longer raises ``work.TimedOut``. This error is both a
    ``CollectiveTimeout`` and a ``DistBackendError``, and it lists the late ranks as far as they are known.

    Args:
        world_ranks (sequence of int): the world ranks of the members, in the order of their group ranks.
        name (str): the name of the group in torch.distributed and in reports.
        timeout (datetime.timedelta): longest duration of a wait. For torch's default (30 minutes),
            ``Tuning.deadline_seconds`` applies instead.
    """

    def __init__(self, world_ranks: Sequence[int], name: str, timeout: dt.timedelta) -> None:
        membership = communicator_pool.acquire(world_ranks)
        self.comm = comm = membership.comm
        super().__init__(comm.rank, comm.size)
        self.extra = ExtraOperations(comm)
        self.queue = CallQueue(comm, f"group-{name}")
        self.mailbox = p2p.Mailbox(membership)
        self.bucket_memories: Any = WeakTensorKeyDictionary()  # parameter -> memory, for ``ddp_buckets.average``
        self.set_timeout(timeout)
        self._coalesced: list[Any] | None = None
        torch_internals.add_placeholder(self, comm.rank, comm.size)

    def getBackendName(self) -> str:  # noqa: N802 - C++ calls this name
        return NAME

    def set_timeout(self, timeout: dt.timedelta) -> None:
        """Set the timeout of waits. For torch's default (30 minutes), the package's own timeout applies."""
        deadline = float(config.current.deadline_seconds) if config.can_raise else None
        seconds = timeout.total_seconds()
        self.seconds = deadline if seconds == torch_internals.DEFAULT_SECONDS else seconds

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None, timeout: Any = None) -> Any:
        reduction, inputs = reduction_of(opts), as_list(tensors)
        if reduction.factor is None and len(inputs) == 1:
            (x,) = inputs
            # Only an asynchronous call can be for a bucket, because DDP's C++ code does not wait in the call.
            is_kept = torch_internals.keeps_bucket() if getattr(opts, "asyncOp", True) else None
            if is_kept is not None and ddp_buckets.is_bucket(x):
                return self.carry_out(ddp_buckets.allreduce(self.comm, x, reduction.op, is_kept), opts)
            if not x.is_sparse and (reduction.op != "avg" or x.dtype not in WHOLE_NUMBERS):
                operation = kept_plans.allreduce(_allreduce, x, self.comm, reduction.op)
                return self.carry_out(([operation], inputs, ()), opts)
        return self.carry_out(group_calls.allreduce(self.extra, inputs, reduction), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return self.carry_out(group_calls.allreduce_together(self.extra, list(tensors), reduction_of(opts)), opts)

    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None, timeout: Any = None) -> Any:
        root = root_of(opts)
        call = group_calls.broadcast(self.comm, as_list(tensors), root)
        return self.carry_out(call, opts, is_written=self.comm.rank != root)

    def reduce(self, tensors: Tensors | Tensor, opts: Any, op: Any = None, timeout: Any = None) -> Any:
        reduction, root = reduction_of(op if isinstance(opts, int) else opts), root_of(opts)
        call = group_calls.reduce(self.extra, as_list(tensors), root, reduction)
        return self.carry_out(call, opts, is_written=self.comm.rank == root)

    def allgather(self, outputs: Sequence[Any], inputs: Tensors | Tensor, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self.carry_out(group_calls.allgather(self.comm, outputs, inputs), opts)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> Any:
        # torch passes one list per rank, but the call needs one list per tensor.
        by_tensor = [list(of_tensor) for of_tensor in zip(*output_lists, strict=True)]
        return self.carry_out(group_calls.allgather(self.comm, by_tensor, input_list), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self.carry_out(group_calls.allgather_single(self.comm, outputs, inputs), opts)

    def gather(self, outputs: Sequence[Any], inputs: Tensors | Tensor, opts: Any, timeout: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self.carry_out(group_calls.gather(self.extra, outputs, inputs[0], root_of(opts)), opts)

    def scatter(self, outputs: Tensors | Tensor, inputs: Sequence[Any], opts: Any, timeout: Any = None) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self.carry_out(group_calls.scatter(self.extra, outputs[0], inputs, root_of(opts)), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self.carry_out(group_calls.reduce_scatter(self.extra, outputs, inputs, reduction_of(opts)), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self.carry_out(group_calls.reduce_scatter_single(self.extra, outputs, inputs, reduction_of(opts)), opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int],  # noqa: A002
        opts: Any = None,
    ) -> Any:  # fmt: skip
        call = group_calls.alltoall_single(self.extra, output, input, list(output_splits), list(input_splits))
        return self.carry_out(call, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self.carry_out(group_calls.alltoall(self.extra, outputs, inputs), opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        return self.carry_out(([self.extra.operation("barrier")], [], ()), opts)

    # Older versions of torch call these methods by the following names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        self._check_open()
        message = self.mailbox.send(tensors[0], destination, tag, self.seconds, torch_internals.program())
        return self._posted(message)

    def recv(self, tensors: Tensors, source: int | None, tag: int) -> Any:
        self._check_open()
        message = self.mailbox.receive(tensors[0], source, tag, self.seconds, torch_internals.program())
        return self._posted(message)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        return self.recv(tensors, None, tag)

    def split_group(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("split_group: backend torchmpi does not split groups; call dist.new_group(ranks)")

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced, None
        return Several(works or [])

    def shutdown(self) -> None:
        """Wait for this rank's calls, up to the timeout, and release the communicator.

        The other ranks need not make this call.
        """
        self._end(self.seconds)

    def abort(self) -> None:
        """Release the communicator without waiting for this rank's calls.

        The other ranks need not make this call.
        """
        self._end(0.0)

    def _end(self, seconds: float | None) -> None:
        if self.queue.is_open:
            self.queue.close(seconds)
            if communication_thread.is_installed():
                communication_thread.current().remove_companion(self.mailbox)
                self.mailbox.close()
            self.bucket_memories.clear()
            symmetric.drop_unused()
            communicator_pool.release(self.comm)

    def carry_out(self, call: Call, opts: Any = None, *, is_written: bool = True) -> Any:
        """Carry out or queue ``call``, and return its Work.

        A blocking call is complete when this method returns, unless other calls are under way or the call has a
        timeout. ``opts`` may contain a timeout, and whether the program waits in this call. ``is_written`` is False if
        the call does not overwrite the tensors of this rank.
        """
        operations, results, _ = call
        if not operations:
            return OVER
        timeout = getattr(opts, "timeout", None)
        seconds = self.seconds if timeout is None or timeout.days < 0 else timeout.total_seconds() or self.seconds
        is_nested = callback_state.is_in_callback
        is_launch = getattr(opts, "asyncOp", True) or seconds is not None
        for x in results if is_written else ():
            if x.requires_grad:
                group_calls.warn_in_backward(operations[0].plan.name, x)
        program = torch_internals.program()
        if not is_launch and not is_nested and self.queue.run_here(call, program):
            return OVER
        self._check_open()
        if is_nested:
            self.queue.run_in_callback(call, program)
            return Done(results)
        return self._posted(self.queue.submit(call, is_launch, seconds, program))

    def _posted(self, work: PendingWork) -> PendingWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_open(self) -> None:
        if not self.queue.is_open:
            raise CommunicatorError(f"process group {self.group_name!r} was destroyed; create a new group to continue")
        communicators.resolve(self.comm)


def reduction_of(opts: Any) -> GroupReduction:
    """Return the reduction that torch.distributed passes, in ``opts.reduceOp`` or as ``opts``; default: the sum."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return GroupReduction("sum", None)
    number = getattr(op, "op", op).value
    reduction = _BY_NUMBER.get(number)
    if reduction is None:
        raise ValueError(f"backend torchmpi does not support {op!r}; use one of {', '.join(_OPS)}")
    return reduction if number != _PREMUL_SUM else GroupReduction("sum", op.__getstate__()[1])


def root_of(opts: Any) -> int:
    """Return the root that torch.distributed passes, in ``opts.rootRank`` or as ``opts``."""
    return opts if isinstance(opts, int) else int(opts.rootRank)


def as_list(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """Return ``tensors`` as a list. torch.distributed passes a sequence of tensors or a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


# A compiled function may call collectives from C++, and C++ calls these methods. The compiler must not trace into them.
compiling.leave_alone(ProcessGroup, CallWork, Done, PendingWork, QueuedCall, Several, Message)
torch_internals.keep_join_notices()
