"""The table of the package's collectives and messages, with one row for each.

A new collective needs a row here, a method in ``collectives/flavour.py`` and in the flavours that support it, and a
function in ``collectives/verbs.py``. A function without a row raises an error at import. The rows also determine how
calls are compared between ranks, the keys of the selector, which calls can form wait cycles, and the names in the
flight recorder.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Writes(enum.Enum):
    """The memory to which a collective writes its result: ``x``, ``x`` unless ``out`` is passed, or other memory."""

    X = enum.auto()
    X_WITHOUT_OUT = enum.auto()
    OTHER_MEMORY = enum.auto()


class Collective(NamedTuple):
    """The properties of a collective, or of a message between ranks, that do not depend on its arguments."""

    name: str
    writes: Writes
    is_compared: bool = True
    """Whether every rank of the communicator makes the same call. False for messages."""
    needs_all: bool = False
    """Whether no rank can complete the call before every rank has made the call."""
    keeps_plans: bool = False
    """Whether a repeated call with flat tensors finds its plan without any check. On every rank, the flavour must then
    read ``x`` and write ``out`` or ``x``, and the tensor that it writes must be the first argument of
    ``Call.of_tensors``. The flavour receives one tensor if the collective writes X, otherwise two."""
    is_tuned: bool = False
    """Whether ``autotune`` measures the collective by default."""
    torch_name: str | None = None
    """The name in PyTorch's flight recorder; None if PyTorch has no such collective."""


_X, _X_WITHOUT_OUT, _OTHER_MEMORY = Writes
_ROWS = (
    Collective("broadcast", _X, keeps_plans=True, is_tuned=True, torch_name="broadcast"),
    Collective("reduce", _X_WITHOUT_OUT, is_tuned=True, torch_name="reduce"),
    Collective("allreduce", _X_WITHOUT_OUT, needs_all=True, keeps_plans=True, is_tuned=True, torch_name="all_reduce"),
    Collective("allgather", _OTHER_MEMORY, needs_all=True, is_tuned=True, torch_name="all_gather"),
    Collective("reduce_scatter", _OTHER_MEMORY, needs_all=True, is_tuned=True, torch_name="reduce_scatter"),
    Collective("alltoall", _X_WITHOUT_OUT, needs_all=True, is_tuned=True, torch_name="all_to_all"),
    Collective("gather", _OTHER_MEMORY, torch_name="gather"),
    Collective("scatter", _OTHER_MEMORY, torch_name="scatter"),
    Collective("sendreceive", _X, is_compared=False),
    Collective("send", _OTHER_MEMORY, is_compared=False),
    Collective("recv", _X, is_compared=False),
    Collective("broadcast_object", _OTHER_MEMORY, torch_name="broadcast"),
    Collective("allgather_object", _OTHER_MEMORY, needs_all=True, torch_name="all_gather"),
)
COLLECTIVES = {row.name: row for row in _ROWS}
MESSAGES = frozenset(row.name for row in _ROWS if not row.is_compared)
