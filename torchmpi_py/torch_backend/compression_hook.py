"""Compress the gradients of DistributedDataParallel: ``ddp.register_comm_hook(None, torch_backend.compressed(...))``.

The reduction of a bucket is launched when DDP passes the bucket to the hook, while other gradients are still being
computed. After the launch of the last bucket, all reductions are finished in the order of their launch. The order is
fixed because some compressions call collectives when they finish.
"""

from collections.abc import Callable  # DDP requires the annotations of a hook to be types, not strings.
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
    """The buckets of one module: for each bucket number, the parameters and the compressor of their gradients."""

    def __init__(self, compression: Compression, comm: Communicator) -> None:
        self.compression = compression
        self.comm = comm
        self._buckets: dict[int, tuple[list[Tensor], Compressor]] = {}
        self._module: set[Tensor] = set()  # parameters of the buckets in the first backward pass
        self._launched: list[tuple[Compressor, list[Handle[Any]], torch.futures.Future[Tensor]]] = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the reduction of a bucket. After the last bucket, finish the reductions of all buckets."""
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
        """Return the last step's compressor, or a new compressor if DDP has moved parameters to other buckets."""
        members = bucket.parameters()
        parameters, compressor = self._buckets.get(bucket.index(), (None, None))
        if parameters is None:
            self._module.update(members)
        elif not self._module.issuperset(members):
            raise RuntimeError("compressed: two modules share this hook; create a separate hook for each module")
        if compressor is None or list(map(id, parameters or [])) != list(map(id, members)):
            flat = torch.empty_like(x)  # Use separate memory: DDP may replace its buckets on some ranks.
            views = list(views_of(flat, members))  # The views have the layout of DDP's gradients.
            own = self.compression.compressor(flat, views, self.comm) if self.comm.size > 1 else None
            compressor = own or Compressor(flat, views, self.comm)
            self._buckets[bucket.index()] = members, compressor
        return compressor


def compressed(compression: Compression, group: Any = None) -> Hook:
    """Return a DDP communication hook that averages compressed gradients over the ranks of ``group``.

    Every rank of the group must call this with the same compression, and must register the hook with its module.
    Create a separate hook for each module. The hook overwrites DDP's gradients with their mean.

    A compression may carry a remainder over to the next step. The remainder is lost when DDP moves parameters to other
    buckets, after the first step. Checkpoints do not contain the remainder. To go back to an earlier state, wrap the
    module in DDP again, with a new hook.

    Args:
        compression (Compression): compression of the gradients, for example ``optim.compression.PowerSGD(2)``.
        group (ProcessGroup): the process group that the module was wrapped with, of backend "torchmpi"; default None,
            the default group.

    Returns:
        The hook for ``ddp.register_comm_hook(state, hook)``, where ``state`` must be None or the group. The hook raises
        ValueError for a different state, RuntimeError with a second module, and TypeError for sparse gradients.

    Raises:
        TypeError: ``compression`` is not a compression, or ``group`` is not a group of backend "torchmpi".
        RuntimeError: ``group`` is None, and there is no default group.

    Examples:
        Average 16-bit gradients of a module in DDP:

            ddp = torch.nn.parallel.DistributedDataParallel(net)
            ddp.register_comm_hook(None, torch_backend.compressed(optim.compression.BF16()))
    """
    if not isinstance(compression, Compression):
        raise TypeError(f"compressed: expected a compression such as optim.compression.BF16(), found {compression!r}")
    group = torch_internals.group_of_hook("compressed", group)
    buckets = CompressedBuckets(compression, communicators.beside(group.comm, "compressed"))

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if state is not None and state is not group:
            raise ValueError(
                f"compressed: expected None or {group!r} as the hook's state, found {state!r}; pass the module's group "
                "to compressed(..., group=), and register the hook with None"
            )
        return buckets.reduce(bucket)

    return hook
