"""Modules that are kept equal on all ranks, and collectives that autograd follows."""

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
