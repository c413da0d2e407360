"""A hook for DistributedDataParallel: ``ddp.register_comm_hook(None, torch_backend.average)``.

The mean of a bucket is the sum, divided; DDP itself divides gradients before it adds them. So sums of 16-bit gradients
accumulate in float32. On the host, buckets are reduced where they lie, as without the hook (``ddp_buckets.py``).

On GPUs the hook reduces from DDP's memory into symmetric memory, which other ranks of the node read and write directly,
and lets DDP copy from there: no copy more than DDP makes anyway. The symmetric memory is kept from step to step. A
bucket is known by its parameters, for several modules may share a group, each with a bucket number 0. When DDP has
arranged a module's parameters in other buckets, these get memory of their own, and that of an old bucket goes when its
last parameter has moved.
"""

from collections.abc import Sequence  # DDP looks at the hook's annotations: they must be types, and not strings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils.weak import WeakTensorKeyDictionary

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.prepare import builder
from torchmpi_py.torch_backend import ddp_buckets, torch_internals
from torchmpi_py.torch_backend.work import first

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    GradBucket = distributed.GradBucket
_allreduce = builder(verbs.allreduce)


def average(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DDP: the mean of the gradients over the ranks, in memory that the ranks of a node share.

    ``state``: the process group, of this backend, that the module was given; None: the default one. Sums of 16-bit
    gradients accumulate in float32. Every rank must register the hook. The divisor is the number of ranks of the group
    also with ``ddp.join(divide_by_initial_world_size=False)``, as with torch's hooks; without a hook DDP follows it.
    """
    group = torch_internals.group_of_hook("average", state)
    x = torch_internals.check_bucket("average", bucket.buffer())
    if x.is_cpu:
        call = ddp_buckets.allreduce(group.comm, x, "avg", torch_internals.BucketCall.IN_BACKWARD)
    else:
        memory = _memory(group, bucket.parameters(), x)
        target = x if memory is None else memory
        call = [_allreduce(x, out=target, op="avg", comm=group.comm)], [target], ()
    work = group.carry_out(call)
    return work.get_future().then(first)  # type: ignore[no-any-return]


def _memory(group: Any, parameters: list[Tensor], x: Tensor) -> Tensor | None:
    """Symmetric memory for a bucket, kept for the next step; None where there is none. Collective."""
    kept = group.buckets.find(parameters, x)
    if kept is not None:
        return kept.memory  # type: ignore[no-any-return]
    made: list[Tensor | None] = []
    group.carry_out(([group.extra.operation("memory", x.nbytes, x.device, made.append)], [], ())).wait()
    memory = None if made[0] is None else made[0].view(x.dtype).view(x.shape)
    group.buckets.keep(parameters, memory)
    return memory


class Kept(NamedTuple):
    """Symmetric memory for a bucket of so many parameters; None where there is none to be had."""

    memory: Tensor | None
    num_parameters: int


class BucketMemory:
    """The memory for the buckets of all modules of one process group."""

    def __init__(self) -> None:
        self._of: Any = WeakTensorKeyDictionary()

    def find(self, parameters: Sequence[Tensor], x: Tensor) -> Kept | None:
        """The memory kept for a bucket of these parameters, whose gradients are ``x``."""
        kept: Kept | None = self._of.get(parameters[0])
        if kept is None or kept.num_parameters != len(parameters):
            return None
        if any(self._of.get(p) is not kept for p in parameters):
            return None
        fits = kept.memory is None or (kept.memory.numel() == x.numel() and kept.memory.dtype == x.dtype)
        return kept if fits else None

    def keep(self, parameters: Sequence[Tensor], memory: Tensor | None) -> None:
        """Keep ``memory`` for a bucket of these parameters, as long as they live."""
        kept = Kept(memory, len(parameters))
        for parameter in parameters:
            self._of[parameter] = kept

    def clear(self) -> None:
        """Give all of it back."""
        self._of.clear()
