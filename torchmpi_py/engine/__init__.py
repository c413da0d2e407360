"""The training engine: torchnet's loop with hooks, alone or data-parallel over MPI ranks."""

from torchmpi_py.engine.allreduce_sgd import AllReduceSGDEngine
from torchmpi_py.engine.checkpoint import Checkpoint, Checkpoints
from torchmpi_py.engine.iterators import DatasetIterator
from torchmpi_py.engine.meters import Accuracy, Average, show_progress
from torchmpi_py.engine.resume import EndRequests
from torchmpi_py.engine.sgd import SGDEngine
from torchmpi_py.engine.sources import Source
from torchmpi_py.engine.state import Hooks, State
from torchmpi_py.engine.streams import Shards, StreamIterator

__all__ = [
    "Accuracy",
    "AllReduceSGDEngine",
    "Average",
    "Checkpoint",
    "Checkpoints",
    "DatasetIterator",
    "EndRequests",
    "Hooks",
    "SGDEngine",
    "Shards",
    "Source",
    "State",
    "StreamIterator",
    "show_progress",
]
