"""The process group: torch.distributed's calls, in terms of the package's verbs.

torch.distributed hands over lists of tensors, some of them in several forms of the same collective. Here they become
operations on flat tensors (``group_calls.py``). A queue carries them out in the order of the calls (``call_queue.py``).
Point-to-point messages do not queue (``p2p.py``). The import prepares torch for groups of this class.
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
_PREMUL_SUM = _KINDS.PREMUL_SUM.value  # torch's enumerations are slow: numbers are compared in their place
_allreduce = builder(verbs.allreduce)
_Base: Any = distributed.ProcessGroup  # whose methods have several signatures each; this class takes all of them


class ProcessGroup(_Base):  # type: ignore[misc]
    """A process group of torch.distributed on a communicator of its own; ``distributed.init_process_group`` makes it.

    Collectives as documented there. With a ``timeout`` other than torch's default, a wait for a call that takes longer
    raises ``work.TimedOut``, which names the ranks that are late, as far as known.
    """

    def __init__(self, world_ranks: Sequence[int], name: str, timeout: dt.timedelta) -> None:
        membership = communicator_pool.acquire(world_ranks)
        self.comm = comm = membership.comm
        super().__init__(comm.rank, comm.size)
        self.extra = ExtraOperations(comm)
        self.queue = CallQueue(comm, f"group-{name}")
        self.mailbox = p2p.Mailbox(membership)
        self.bucket_memories: Any = WeakTensorKeyDictionary()  # of ``ddp_buckets.average``, by parameter
        self.set_timeout(timeout)
        self._coalesced: list[Any] | None = None
        torch_internals.add_placeholder(self, comm.rank, comm.size)

    def getBackendName(self) -> str:  # noqa: N802 - C++ asks for it by this name
        return NAME

    def set_timeout(self, timeout: dt.timedelta) -> None:
        """Let waits give up after ``timeout``; for torch's default (30 minutes) the package's own deadline counts."""
        deadline = float(config.current.deadline_seconds) if config.can_raise else None
        seconds = timeout.total_seconds()
        self.seconds = deadline if seconds == torch_internals.DEFAULT_SECONDS else seconds

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None, timeout: Any = None) -> Any:
        reduction, given = reduction_of(opts), as_list(tensors)
        if reduction.factor is None and len(given) == 1:
            (x,) = given
            # C++, which reduces buckets, does not wait in the call.
            is_kept = torch_internals.keeps_bucket() if getattr(opts, "asyncOp", True) else None
            if is_kept is not None and ddp_buckets.is_bucket(x):
                return self.carry_out(ddp_buckets.allreduce(self.comm, x, reduction.op, is_kept), opts)
            if not x.is_sparse and (reduction.op != "avg" or x.dtype not in WHOLE_NUMBERS):
                operation = kept_plans.allreduce(_allreduce, x, self.comm, reduction.op)
                return self.carry_out(([operation], given, ()), opts)
        return self.carry_out(group_calls.allreduce(self.extra, given, reduction), opts)

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
        by_tensor = [list(of_tensor) for of_tensor in zip(*output_lists, strict=True)]  # torch gives a list a rank
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

    _allgather_base = all_gather_single  # their names in older versions
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
        """Wait for the calls under way here, at most the timeout, and give the communicator up. Not collective."""
        self._end(self.seconds)

    def abort(self) -> None:
        """``shutdown`` without the wait."""
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
        """The Work of ``call``. A blocking call is over, unless others are under way, or it can time out.

        ``opts``, where torch gives any: a timeout, and whether the program waits in this call. ``is_written``: whether
        the results are written on this rank.
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
            raise CommunicatorError(f"process group {self.group_name!r} was destroyed; make a new one")
        communicators.resolve(self.comm)


def reduction_of(opts: Any) -> GroupReduction:
    """The reduction that torch.distributed gives in options, or as such; without any, the sum."""
    given = getattr(opts, "reduceOp", opts)
    if given is None:
        return GroupReduction("sum", None)
    number = getattr(given, "op", given).value
    reduction = _BY_NUMBER.get(number)
    if reduction is None:
        raise ValueError(f"backend torchmpi does not know {given!r}; it knows {', '.join(_OPS)}")
    return reduction if number != _PREMUL_SUM else GroupReduction("sum", given.__getstate__()[1])


def root_of(opts: Any) -> int:
    """The root, which torch.distributed gives in options or as a plain number."""
    return opts if isinstance(opts, int) else int(opts.rootRank)


def as_list(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """The list of tensors, where torch.distributed gives a list or one tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


# A compiled function may call collectives from C++, which come back to Python here: the compiler would follow them.
compiling.leave_alone(ProcessGroup, CallWork, Done, PendingWork, QueuedCall, Several, Message)
torch_internals.keep_join_notices()
