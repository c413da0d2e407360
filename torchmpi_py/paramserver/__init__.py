"""Parameter servers: tensors whose shards are distributed over the ranks.

Every rank can send updates and fetch values at any time.

The design follows TorchMPI's parameter server (reference section 5).
"""

from torchmpi_py.paramserver.difference import DifferenceUpdate
from torchmpi_py.paramserver.downpour import DownpourUpdate
from torchmpi_py.paramserver.easgd import EAMSGDUpdate, EASGDUpdate
from torchmpi_py.paramserver.hogwild import Hogwild
from torchmpi_py.paramserver.rules import register_rule
from torchmpi_py.paramserver.server import ParameterServer, free_all, init
from torchmpi_py.paramserver.stale import StaleSynchronousUpdate
from torchmpi_py.paramserver.synchronous import SynchronousUpdate
from torchmpi_py.paramserver.tensor_lists import (
    ServedTensors,
    init_tensors,
    integrate_tensors,
    prefetch_tensors,
    send_tensors,
)
from torchmpi_py.paramserver.timetable import Timetable
from torchmpi_py.paramserver.update import Update

__all__ = [
    "DifferenceUpdate",
    "DownpourUpdate",
    "EAMSGDUpdate",
    "EASGDUpdate",
    "Hogwild",
    "ParameterServer",
    "ServedTensors",
    "StaleSynchronousUpdate",
    "SynchronousUpdate",
    "Timetable",
    "Update",
    "free_all",
    "init",
    "init_tensors",
    "integrate_tensors",
    "prefetch_tensors",
    "register_rule",
    "send_tensors",
]
