"""Around an optimizer: gradients that are averaged, compressed or missing on some ranks; state that all ranks share."""

from torchmpi_py.nn import compression
from torchmpi_py.nn.optimizer_state import broadcast_optimizer_state
from torchmpi_py.optim.distributed import DistributedOptimizer
from torchmpi_py.optim.joining import join
from torchmpi_py.optim.sharded import ShardedOptimizer

__all__ = [
    "DistributedOptimizer",
    "ShardedOptimizer",
    "broadcast_optimizer_state",
    "compression",
    "join",
]
