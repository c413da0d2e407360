"""Compressed gradients for DistributedDataParallel: ``ddp.register_comm_hook(None, torch_backend.compressed(...))``.

Buckets are launched as DDP hands them over, while other gradients are computed, and finished in the same order with the
last one: what a compression still has to agree on then is collective, and must not depend on which bucket is first.
"""

from collections.abc import Callable  # DDP looks at the hook's annotations: they must be types, and not strings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core import communicators
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.nn.bucket import shaped
from torchmpi_py.nn.compression import Compression, Compressor
from torchmpi_py.torch_backend import torch_internals
from torchmpi_py.torch_backend.torch_internals import GradBucket

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class CompressedBucket(NamedTuple):
    """A bucket of DDP: its parameters, memory for their gradients, and a compressor (None: they go as they are)."""

    parameters: list[Tensor]
    flat: Tensor
    compressor: Compressor | None


class CompressedBuckets:
    """The buckets of one module, by number."""

    def __init__(self, compression: Compression, comm: Communicator) -> None:
        self.compression = compression
        self.comm = comm
        self._buckets: dict[int, CompressedBucket] = {}
        self._module: set[Tensor] = set()  # all its parameters, from the first backward pass
        self._launched: list[tuple[CompressedBucket, list[Handle[Any]], torch.futures.Future[Tensor]]] = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the reduction of a bucket; of the last one: finish all."""
        x = torch_internals.check_bucket("compressed", bucket.buffer())
        used = self._find(bucket, x)
        used.flat.copy_(x)
        if used.compressor is None:
            handles: list[Handle[Any]] = [verbs.allreduce_async(used.flat, op="avg", comm=self.comm)]
        else:
            handles = used.compressor.launch("avg")
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
        self._launched.append((used, handles, future))
        if bucket.is_last():
            self._finish()
        return future

    def _find(self, bucket: GradBucket, x: Tensor) -> CompressedBucket:
        """The bucket as it was in the last step, or a new one: DDP may have arranged the parameters in others."""
        members, known = bucket.parameters(), self._buckets.get(bucket.index())
        if known is None:
            self._module.update(members)
        elif not self._module.issuperset(members):
            raise RuntimeError("a hook made by compressed(...) serves one module; make another one for this module")
        if known is not None and list(map(id, known.parameters)) == list(map(id, members)):
            return known
        flat, compressor = torch.empty_like(x), None  # memory of its own, for DDP may change that of its buckets
        if self.comm.size > 1:
            parts = torch.split(flat, [p.numel() for p in members])
            views = [shaped(part, p) for part, p in zip(parts, members, strict=True)]  # as DDP lays gradients out
            compressor = self.compression.compressor(flat, views, self.comm)
        self._buckets[bucket.index()] = made = CompressedBucket(members, flat, compressor)
        return made

    def _finish(self) -> None:
        launched, self._launched = self._launched, []
        wait_all([handle for _, handles, _ in launched for handle in handles])
        for used, _, future in launched:
            if used.compressor is not None:
                used.compressor.finish("avg")
            future.set_result(used.flat)


def compressed(compression: Compression, group: Any = None) -> Hook:
    """A communication hook for one module in DDP: the mean of gradients that travel compressed.

    compression: such as ``optim.compression.PowerSGD(2)``. group: the process group, of this backend, that the module
    was given; None: the default one. Collective over the group, with the same compression on all ranks. The hook's
    state, its first argument, is None or the group. What a compression leaves out is lost when DDP arranges the
    parameters in other buckets, after the first step. No checkpoint has it: to go back to an earlier state, wrap the
    module in DDP again, with a new hook.

    Raises TypeError for another compression or group, RuntimeError without a default group. The hook raises ValueError
    for another state, RuntimeError with a second module, TypeError for sparse gradients.
    """
    if not isinstance(compression, Compression):
        raise TypeError(f"compressed: {compression!r} is no compression; give one such as optim.compression.BF16()")
    group = torch_internals.group_of_hook("compressed", group)
    buckets = CompressedBuckets(compression, communicators.beside(group.comm, "compressed"))

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if state is not None and state is not group:
            raise ValueError(
                f"compressed: the hook's state is {state!r}, but it was made for {group!r}; make it with "
                "compressed(..., group=) of the module's group, and register it with None"
            )
        return buckets.reduce(bucket)

    return hook
