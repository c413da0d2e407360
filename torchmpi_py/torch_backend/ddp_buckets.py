"""The buckets of DistributedDataParallel, reduced in memory that all ranks of a node map.

DDP allocates its buckets itself, copies gradients in, has each bucket reduced, and copies the gradients out. (With
``gradient_as_bucket_view=True`` the gradients stay in the bucket.) A bucket lives for many steps. So the memory of a
bucket on the host is moved at its first allreduce (``symmetric.adopt``), and from then on the ranks reduce it where it
lies. All ranks of a group make the same calls for DDP. So the selector is asked as for symmetric tensors.

With the hook, ``ddp.register_comm_hook(None, torch_backend.average)``, the mean of a bucket is the sum, divided; DDP
itself divides gradients before it adds them. So sums of 16-bit gradients accumulate in float32.

On GPUs the hook reduces from DDP's memory into symmetric memory, which other ranks of the node read and write directly,
and lets DDP copy from there: no copy more than DDP makes anyway. The symmetric memory is kept from step to step. A
bucket is known by its parameters, for several modules may share a group, each with a bucket number 0. When DDP has
arranged a module's parameters in other buckets, these get memory of their own, and the memory of an old bucket goes
when its last parameter has moved.
"""

import dataclasses
from collections.abc import Sequence  # DDP looks at the hook's annotations: they must be types, and not strings
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.plan import Operation
from torchmpi_py.collectives.prepare import builder
from torchmpi_py.collectives.registry import BY_NAME
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.torch_backend import torch_internals
from torchmpi_py.torch_backend.call_queue import Call
from torchmpi_py.torch_backend.torch_internals import GradBucket
from torchmpi_py.torch_backend.work import first

_allreduce, _SHARED = builder(verbs.allreduce), BY_NAME["shared"]


def is_bucket(x: Tensor) -> bool:
    """Whether a tensor that DDP's C++ has reduced is a bucket on the host, and not DDP's map of used parameters."""
    is_map = not (x.is_floating_point() or x.is_complex())
    return x.dim() == 1 and x.is_cpu and not x.is_sparse and x.is_contiguous() and not (is_map or x.requires_grad)


def allreduce(comm: Communicator, x: Tensor, op: str, is_kept: bool) -> Call:
    """The allreduce of one bucket. ``is_kept``: DDP uses the bucket for many steps."""
    chosen = selector.flavour_for("allreduce", comm, x.device, x.nbytes, symmetric=True, name=None)
    operation = _allreduce(x, op=op, comm=comm, flavour=chosen.name)
    # A bucket moves at its first allreduce or never: a program may have taken addresses of gradients since then.
    storage: Any = x.untyped_storage()
    if operation.plan.flavour is not _SHARED:
        storage.stays_where_it_is = True
    elif is_kept and not hasattr(storage, "stays_where_it_is"):
        operation = Operation(dataclasses.replace(operation.plan, method="allreduce_adopting"), (x,), x)
    return [operation], [x], ()


def average(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DDP: the mean of the gradients over the ranks, in memory that the ranks of a node share.

    ``state``: the process group, of this backend, that the module was given; None: the default one. Sums of 16-bit
    gradients accumulate in float32. Every rank must register the hook. The divisor is the number of ranks of the group
    also with ``ddp.join(divide_by_initial_world_size=False)``, as with torch's hooks; without a hook DDP follows it.
    """
    group = torch_internals.group_of_hook("average", state)
    x = torch_internals.check_bucket("average", bucket.buffer())
    if x.is_cpu:
        call = allreduce(group.comm, x, "avg", is_kept=True)
    else:
        target = _memory(group, bucket.parameters(), x)
        call = [_allreduce(x, out=target, op="avg", comm=group.comm)], [target], ()
    work = group.carry_out(call)
    return work.get_future().then(first)  # type: ignore[no-any-return]


def _memory(group: Any, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """Symmetric memory for the bucket ``x``, kept for the next step; ``x`` where there is none. Collective."""
    memories = group.bucket_memories
    memory = memories.get(parameters[0])
    if memory is None or memory.nbytes not in (0, x.nbytes) or any(memories.get(p) is not memory for p in parameters):
        taken: list[Tensor | None] = []
        group.carry_out(([group.extra.operation("memory", x.nbytes, x.device, keep=taken.append)], [], ())).wait()
        memory = x.new_empty(0) if taken[0] is None else taken[0]
        for parameter in parameters:
            memories[parameter] = memory
    return memory.view(x.dtype).view(x.shape) if memory.nbytes else x
