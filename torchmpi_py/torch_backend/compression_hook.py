"""Compressed gradients for DistributedDataParallel: ``ddp.register_comm_hook(None, torch_backend.compressed(...))``.

Buckets are launched as DDP hands them over, while other gradients are computed, and finished in the same order with the
last one: what a compression still has to agree on then is collective, and must not depend on which bucket is first.
"""

from collections.abc import Callable  # DDP looks at the hook's annotations: they must be types, and not strings
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core import communicators
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.nn.compression import Compression, Compressor
from torchmpi_py.nn.gradient_reducer import views_of
from torchmpi_py.torch_backend import torch_internals
from torchmpi_py.torch_backend.torch_internals import GradBucket

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class CompressedBuckets:
    """The buckets of one module, by number: the parameters, and the compressor for their gradients."""

    def __init__(self, compression: Compression, comm: Communicator) -> None:
        self.compression = compression
        self.comm = comm
        self._buckets: dict[int, tuple[list[Tensor], Compressor]] = {}
        self._module: set[Tensor] = set()  # all its parameters, from the first backward pass
        self._launched: list[tuple[Compressor, list[Handle[Any]], torch.futures.Future[Tensor]]] = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the reduction of a bucket; of the last one: finish all."""
        x = torch_internals.check_bucket("compressed", bucket.buffer())
        compressor = self._find(bucket, x)
        compressor.flat.copy_(x)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
        self._launched.append((compressor, compressor.launch("avg"), future))
        if bucket.is_last():
            launched, self._launched = self._launched, []
            wait_all([handle for _, handles, _ in launched for handle in handles])
            for each, _, its_future in launched:
                each.finish("avg")
                its_future.set_result(each.flat)
        return future

    def _find(self, bucket: GradBucket, x: Tensor) -> Compressor:
        """The compressor of the last step, or a new one: DDP may have arranged the parameters in other buckets."""
        members = bucket.parameters()
        parameters, compressor = self._buckets.get(bucket.index(), (None, None))
        if parameters is None:
            self._module.update(members)
        elif not self._module.issuperset(members):
            raise RuntimeError("a hook made by compressed(...) serves one module; make another one for this module")
        if compressor is None or list(map(id, parameters or [])) != list(map(id, members)):
            flat = torch.empty_like(x)  # memory of its own, for DDP may change that of its buckets on some ranks
            views = list(views_of(flat, members))  # as DDP lays gradients out
            made = self.compression.compressor(flat, views, self.comm) if self.comm.size > 1 else None
            compressor = made or Compressor(flat, views, self.comm)
            self._buckets[bucket.index()] = members, compressor
        return compressor


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
