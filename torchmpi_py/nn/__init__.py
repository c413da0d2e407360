"""Modules over ranks: kept the same on every one, split over several, or with collectives that autograd follows."""

from torchmpi_py.nn import functional
from torchmpi_py.nn.async_backward import AsyncBackward, register_async_backward
from torchmpi_py.nn.block_sequential import Block, BlockSequential
from torchmpi_py.nn.clipping import clip_grad_norm_
from torchmpi_py.nn.parallel import ColumnParallelLinear, ModelParallel, ParallelEmbedding, RowParallelLinear
from torchmpi_py.nn.parts import parallel_cross_entropy
from torchmpi_py.nn.point_to_point import recv, send
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
    "ColumnParallelLinear",
    "ModelParallel",
    "ParallelEmbedding",
    "RowParallelLinear",
    "SyncBatchNorm",
    "check_with_allreduce",
    "clip_grad_norm_",
    "functional",
    "parallel_cross_entropy",
    "recv",
    "register_async_backward",
    "send",
    "synchronize_buffers",
    "synchronize_gradients",
    "synchronize_parameters",
]
