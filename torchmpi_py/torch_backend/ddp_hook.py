"""The cheapest way for DistributedDataParallel's buckets: ``ddp.register_comm_hook(None, torch_backend.average)``.

DDP hands over a bucket of gradients in memory of its own, and copies the result out again, into the gradients. The
hook reduces from the one into symmetric memory, which other ranks of the node read and write directly, and lets DDP
copy from there: no copy more than DDP makes by itself. (With ``gradient_as_bucket_view=True`` DDP wants the result in
its own memory, so that there is one.)
"""

from typing import TYPE_CHECKING, Any  # DDP looks at the hook's annotations: they must be types, and not strings

import torch
from torch import Tensor, distributed

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.prepare import builder
from torchmpi_py.torch_backend.call_queue import Call
from torchmpi_py.torch_backend.process_group import ProcessGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = distributed.GradBucket
_allreduce = builder(verbs.allreduce)


def average(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DDP: the mean of the gradients over the ranks, by way of symmetric memory.

    ``state``: the process group, of this backend, that the module was given; None: the default one. Sums of 16-bit
    gradients accumulate in float32. Every rank must register it.
    """
    group = distributed.group.WORLD if state is None else state
    if group is None:
        raise RuntimeError("average: there is no default process group (any more); call init_process_group first")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"average: {group!r} is not a process group of backend torchmpi; give one as the hook's state")
    x = bucket.buffer()
    memory = _memory(group, bucket.parameters(), x)
    target = x if memory is None else memory
    work = group.carry_out(Call([_allreduce(x, out=target, op="avg", comm=group.comm)], [target]))
    return work.get_future().then(_first)  # type: ignore[no-any-return]


def _first(future: torch.futures.Future[Any]) -> Tensor:
    return future.value()[0]  # type: ignore[no-any-return]


def _memory(group: ProcessGroup, parameters: list[Tensor], x: Tensor) -> Tensor | None:
    """Symmetric memory for a bucket, kept for the next step; None where there is none. Collective."""
    kept = group.buckets.find(parameters, x)
    if kept is not None:
        return kept.memory
    made: list[Tensor | None] = []
    group.carry_out(Call([group.steps.operation("memory", x.nbytes, x.device, made.append)], [])).wait()
    memory = None if made[0] is None else made[0].view(x.dtype).view(x.shape)
    group.buckets.keep(parameters, memory)
    return memory
