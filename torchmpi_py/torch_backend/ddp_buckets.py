"""Reduce the buckets of DistributedDataParallel in memory that all ranks of a node map.

DDP allocates its buckets. In each step it copies gradients into a bucket, calls allreduce, and copies the mean out of
the bucket. (With ``gradient_as_bucket_view=True`` the gradients stay in the bucket.) DDP uses a bucket for many steps.
So the first allreduce moves a host bucket into shared memory (``symmetric.adopt``), and from then on the ranks reduce
the bucket in place. All ranks of a group make the same calls for DDP, so the selector may choose a flavour that needs
symmetric tensors.

With the hook ``ddp.register_comm_hook(None, torch_backend.average)``, gradients are first added and then divided, so
sums of 16-bit gradients accumulate in float32. Without a hook, DDP divides the gradients before it adds them.

On GPUs the hook reduces from DDP's memory into symmetric memory, which other ranks of the node read and write directly.
DDP then copies the mean from this memory, as it copies the result of any hook, so the hook adds no copy. The symmetric
memory is reused in every step. A bucket is identified by its parameters, because several modules may share a group, and
each module has a bucket number 0. If DDP moves a module's parameters to other buckets, the new buckets get new memory.
The memory of an old bucket is freed when all its parameters have moved.
"""

import dataclasses
from collections.abc import Sequence  # DDP requires the annotations of a hook to be types, not strings.
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
    """Return whether a tensor that DDP's C++ code reduces is a host bucket, not DDP's map of used parameters."""
    is_map = not (x.is_floating_point() or x.is_complex())
    return x.dim() == 1 and x.is_cpu and not x.is_sparse and x.is_contiguous() and not (is_map or x.requires_grad)


def allreduce(comm: Communicator, x: Tensor, op: str, is_kept: bool) -> Call:
    """Return the allreduce of one bucket. ``is_kept`` is True if DDP uses the bucket for many steps."""
    chosen = selector.flavour_for("allreduce", comm, x.device, x.nbytes, symmetric=True, name=None)
    operation = _allreduce(x, op=op, comm=comm, flavour=chosen.name)
    # Move a bucket at its first allreduce or never, because the program may store addresses of gradients afterwards.
    storage: Any = x.untyped_storage()
    if operation.plan.flavour is not _SHARED:
        storage.stays_where_it_is = True
    elif is_kept and not hasattr(storage, "stays_where_it_is"):
        operation = Operation(dataclasses.replace(operation.plan, method="allreduce_adopting"), (x,), x)
    return [operation], [x], ()


def average(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the gradients of a DDP bucket over the ranks: a communication hook for ``ddp.register_comm_hook``.

    Every rank must register the hook. DDP calls the hook once per bucket in each backward pass, and copies the mean
    into the gradients; on the CPU the hook overwrites the bucket with the mean. Sums of 16-bit gradients accumulate in
    float32. The divisor is always the number of ranks of the group, as in torch's hooks: the hook ignores
    ``ddp.join(divide_by_initial_world_size=False)``.

    Args:
        state (ProcessGroup): the process group that the module was wrapped with, of backend "torchmpi", or None for the
            default group.
        bucket (GradBucket): the gradients, a flat dense tensor that DDP passes.

    Returns:
        A future of the mean, a tensor with the shape and dtype of the bucket.

    Raises:
        TypeError: ``state`` is not a group of backend "torchmpi", or the gradients are sparse.
        RuntimeError: ``state`` is None, and there is no default group.

    Examples:
        Average the gradients of a module in DDP:

            ddp = torch.nn.parallel.DistributedDataParallel(net)
            ddp.register_comm_hook(None, torch_backend.average)
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
    """Return symmetric memory for the bucket ``x``, the same in each step, or ``x`` if symmetric memory is unavailable.

    All ranks of the group must call this function.
    """
    memories = group.bucket_memories
    memory = memories.get(parameters[0])
    if memory is None or memory.nbytes not in (0, x.nbytes) or any(memories.get(p) is not memory for p in parameters):
        blocks: list[Tensor | None] = []
        group.carry_out(([group.extra.operation("memory", x.nbytes, x.device, keep=blocks.append)], [], ())).wait()
        memory = x.new_empty(0) if blocks[0] is None else blocks[0]
        for parameter in parameters:
            memories[parameter] = memory
    return memory.view(x.dtype).view(x.shape) if memory.nbytes else x
