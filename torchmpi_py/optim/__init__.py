"""Optimizers for many ranks: averaged gradients or parameters, sharded state, and large batches."""

from torchmpi_py.nn import compression
from torchmpi_py.nn.optimizer_state import broadcast_optimizer_state
from torchmpi_py.optim.distributed import DistributedOptimizer
from torchmpi_py.optim.gossip import Gossip
from torchmpi_py.optim.joining import join
from torchmpi_py.optim.local_sgd import LocalSGD
from torchmpi_py.optim.schedules import large_batch
from torchmpi_py.optim.sharded import ShardedOptimizer

__all__ = [
    "DistributedOptimizer",
    "Gossip",
    "LocalSGD",
    "ShardedOptimizer",
    "broadcast_optimizer_state",
    "compression",
    "join",
    "large_batch",
]
