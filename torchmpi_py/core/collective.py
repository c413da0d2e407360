"""The collectives and messages of the package, a row each.

A new collective takes a row here, a method in ``collectives/flavour.py`` and in the flavours that can do it, and a
function in ``collectives/verbs.py``; a function without a row is an error at import. The comparison between ranks, the
keys of the selector, the wait cycles and the flight recorder read the rows.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Writes(enum.Enum):
    """Where a collective writes its result."""

    X = enum.auto()
    OUT_OR_X = enum.auto()
    OUT_OR_NEW = enum.auto()
    NOTHING = enum.auto()


class Collective(NamedTuple):
    """What the package has to know of a collective, or of a message between ranks, beside its arguments."""

    name: str
    writes: Writes
    num_tensors: int
    """How many tensors come first among the arguments of a flavour's method."""
    is_compared: bool = True
    """Whether every rank of the communicator makes the same call. False for messages."""
    waits_for_all: bool = False
    """Whether no rank can complete the call before every rank has made it."""
    keeps_plans: bool = False
    """Whether calls with flat tensors find their plan without any check: on every rank the flavour reads ``x`` and
    writes ``out``, or ``x``."""
    is_tuned: bool = False
    """Whether ``autotune`` measures it by default."""
    torch_name: str | None = None
    """Its name in PyTorch's flight recorder; None where PyTorch has no such collective."""


_ROWS = (
    Collective("broadcast", Writes.X, 1, keeps_plans=True, is_tuned=True, torch_name="broadcast"),
    Collective("reduce", Writes.OUT_OR_X, 2, is_tuned=True, torch_name="reduce"),
    Collective(
        "allreduce", Writes.OUT_OR_X, 2, waits_for_all=True, keeps_plans=True, is_tuned=True, torch_name="all_reduce"
    ),
    Collective("allgather", Writes.OUT_OR_NEW, 2, waits_for_all=True, is_tuned=True, torch_name="all_gather"),
    Collective("reduce_scatter", Writes.OUT_OR_NEW, 2, waits_for_all=True, is_tuned=True, torch_name="reduce_scatter"),
    Collective("alltoall", Writes.OUT_OR_X, 2, waits_for_all=True, is_tuned=True, torch_name="all_to_all"),
    Collective("gather", Writes.OUT_OR_NEW, 2, torch_name="gather"),
    Collective("scatter", Writes.OUT_OR_NEW, 2, torch_name="scatter"),
    Collective("sendreceive", Writes.X, 2, is_compared=False),
    Collective("send", Writes.NOTHING, 1, is_compared=False),
    Collective("recv", Writes.X, 1, is_compared=False),
    Collective("broadcast_object", Writes.NOTHING, 0, torch_name="broadcast"),
    Collective("allgather_object", Writes.NOTHING, 0, waits_for_all=True, torch_name="all_gather"),
)
COLLECTIVES = {row.name: row for row in _ROWS}
MESSAGES = frozenset(row.name for row in _ROWS if not row.is_compared)
