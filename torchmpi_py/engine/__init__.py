"""The training engine: torchnet's loop with hooks, on one process or data-parallel over MPI ranks."""

from torchmpi_py.engine.allreduce_sgd import AllReduceSGDEngine
from torchmpi_py.engine.checkpoint import Checkpoint
from torchmpi_py.engine.checkpoints import Checkpoints, Saved
from torchmpi_py.engine.elastic import Elastic
from torchmpi_py.engine.end_requests import EndRequests
from torchmpi_py.engine.epoch_lines import EpochLines
from torchmpi_py.engine.evaluate import Evaluate
from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.iterators import DatasetIterator
from torchmpi_py.engine.meters import Accuracy, Average
from torchmpi_py.engine.sgd import SGDEngine
from torchmpi_py.engine.sources import Source
from torchmpi_py.engine.state import Hooks, State
from torchmpi_py.engine.streams import Shards, StreamIterator
from torchmpi_py.engine.tensorboard import TensorBoard
from torchmpi_py.engine.training_bar import ProgressBar

__all__ = [
    "Accuracy",
    "AllReduceSGDEngine",
    "Average",
    "Checkpoint",
    "Checkpoints",
    "DatasetIterator",
    "Elastic",
    "EndRequests",
    "EpochLines",
    "Evaluate",
    "Extension",
    "Hooks",
    "ProgressBar",
    "SGDEngine",
    "Saved",
    "Shards",
    "Source",
    "State",
    "StreamIterator",
    "TensorBoard",
]
