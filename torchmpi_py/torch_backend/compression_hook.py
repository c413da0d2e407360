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
from torchmpi_py.torch_backend.ddp_buckets import GradBucket

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class Launched(NamedTuple):
    """A bucket whose reduction has begun."""

    flat: Tensor
    compressor: Compressor | None
    handles: list[Handle[Any]]
    future: torch.futures.Future[Tensor]


class CompressedBuckets:
    """The buckets of one module, by number; each with its compressor and the parameters it was made for."""

    def __init__(self, compression: Compression, comm: Communicator) -> None:
        self.compression = compression
        self.comm = comm
        self._kept: dict[int, tuple[list[Tensor], Tensor, Compressor | None]] = {}
        self._module: list[Tensor] = []  # all its parameters, from the first backward pass
        self._is_known = False
        self._launched: list[Launched] = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the reduction of a bucket; of the last one: finish all."""
        x = torch_internals.check_bucket("compressed", bucket.buffer())
        flat, compressor = self._compressor(bucket, x)
        flat.copy_(x)
        if compressor is None:
            handles: list[Handle[Any]] = [verbs.allreduce_async(flat, op="avg", comm=self.comm)]
        else:
            handles = compressor.launch("avg")
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
        self._launched.append(Launched(flat, compressor, handles, future))
        if bucket.is_last():
            self._is_known = True
            self._finish()
        return future

    def _compressor(self, bucket: GradBucket, x: Tensor) -> tuple[Tensor, Compressor | None]:
        """Memory of the bucket's own, for DDP may change that of its buckets on some ranks, and the compressor."""
        members = bucket.parameters()
        parameters, flat, compressor = self._kept.get(bucket.index(), ([], x, None))
        if len(parameters) != len(members) or any(p is not q for p, q in zip(parameters, members, strict=True)):
            if not self._is_known:
                self._module += members
            elif any(all(p is not q for q in self._module) for p in members):
                raise RuntimeError("a hook made by compressed(...) serves one module; make another one for this module")
            flat = torch.empty_like(x)
            if self.comm.size > 1:
                parts = torch.split(flat, [p.numel() for p in members])
                views = [shaped(part, p) for part, p in zip(parts, members, strict=True)]  # as DDP lays gradients out
                compressor = self.compression.compressor(flat, views, self.comm)
            self._kept[bucket.index()] = members, flat, compressor
        return flat, compressor

    def _finish(self) -> None:
        launched, self._launched = self._launched, []
        wait_all([handle for each in launched for handle in each.handles])
        for each in launched:
            if each.compressor is not None:
                each.compressor.finish("avg")
            each.future.set_result(each.flat)


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
