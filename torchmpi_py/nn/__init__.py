"""Functions and layers that keep modules equal on all ranks, and collectives that autograd can differentiate."""

from typing import Any

from torchmpi_py.nn import functional
from torchmpi_py.nn.async_backward import AsyncBackward, register_async_backward
from torchmpi_py.nn.block_sequential import Block, BlockSequential
from torchmpi_py.nn.sync_batch_norm import SyncBatchNorm
from torchmpi_py.nn.synchronize import (
    check_with_allreduce,
    synchronize_buffers,
    synchronize_gradients,
    synchronize_parameters,
)

__all__ = [
    "AsyncBackward",
    "Block",
    "BlockSequential",
    "SyncBatchNorm",
    "check_with_allreduce",
    "functional",
    "register_async_backward",
    "synchronize_buffers",
    "synchronize_gradients",
    "synchronize_parameters",
]

_REMOVED = {
    "ColumnParallelLinear": "torch.distributed.tensor.parallel.ColwiseParallel",
    "RowParallelLinear": "torch.distributed.tensor.parallel.RowwiseParallel",
    "ParallelEmbedding": "torch.distributed.tensor.parallel.RowwiseParallel for a torch.nn.Embedding",
    "ModelParallel": "torch.distributed.tensor.parallel.parallelize_module",
    "parallel_cross_entropy": "torch.distributed.tensor.parallel.loss_parallel",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    **dict.fromkeys(("send", "recv"), "torch.distributed.pipelining"),
}


def __getattr__(name: str) -> Any:
    hint = f": it was removed; use {_REMOVED[name]} (see docs/from_0.1.md)" if name in _REMOVED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
