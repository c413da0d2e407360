"""The list of all flavours, and what each can do here.

A new flavour takes a file in ``flavours/`` and a row in ``FLAVOURS``.
"""

from __future__ import annotations

import dataclasses

from torchmpi_py.collectives.flavour import Flavour
from torchmpi_py.collectives.flavours.cudaipc import CudaIpc
from torchmpi_py.collectives.flavours.hierarchical import Hierarchical, Members
from torchmpi_py.collectives.flavours.mpi import Mpi
from torchmpi_py.collectives.flavours.ring import Ring
from torchmpi_py.collectives.flavours.shared import Shared
from torchmpi_py.collectives.flavours.staged import Staged
from torchmpi_py.collectives.flavours.torch_group import Gloo, Nccl
from torchmpi_py.core.collective import COLLECTIVES
from torchmpi_py.core.communicators import Communicator, resolve

FLAVOURS: tuple[Flavour, ...] = (  # the first is taken where the selector knows nothing better
    mpi := Mpi(),
    shared := Shared(),
    ring := Ring(),
    cudaipc := CudaIpc(),
    nccl := Nccl(),
    staged := Staged(inners=((shared, 32 << 10), (ring, 1 << 20), (mpi, 0)), point=mpi),
    Hierarchical(
        {
            "cpu": Members(inners=(shared, mpi), rooted=(mpi,), outer=ring),
            "cuda": Members(inners=(cudaipc, nccl, staged), rooted=(cudaipc, nccl, staged), outer=staged),
        }
    ),
    Gloo(),
)
BY_NAME = {flavour.name: flavour for flavour in FLAVOURS}
DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class AvailabilityRow:
    """One flavour, verb and device type."""

    verb: str
    device: str
    flavour: str
    status: str


class Table(tuple[AvailabilityRow, ...]):
    """The rows of ``availability``; its ``str`` is a table with a line for each."""

    def __str__(self) -> str:
        lines = [f"{'verb':17} {'device':7} {'flavour':13} status"]
        return "\n".join(lines + [f"{row.verb:17} {row.device:7} {row.flavour:13} {row.status}" for row in self])


def availability(comm: Communicator | None = None) -> Table:
    """What every flavour can do on ``comm`` (default: the current level), with the reason for every "no".

    A table to print, and a tuple of rows with ``verb``, ``device``, ``flavour`` and ``status``. No other rank needs to
    call this. NotStarted before ``mpi.start()``.
    """
    resolved = resolve(comm)
    return Table(
        AvailabilityRow(verb, device, flavour.name, status(flavour, verb, device, resolved))
        for verb in COLLECTIVES
        for device in DEVICES
        for flavour in FLAVOURS
    )


def status(flavour: Flavour, verb: str, device: str, comm: Communicator) -> str:
    """The text "available", "unimplemented", or "unavailable: " and the reason."""
    if not flavour.implements(verb):
        return "unimplemented"
    if device not in flavour.devices:
        return f"unavailable: serves {', '.join(sorted(flavour.devices))} tensors only"
    reason = flavour.missing(device) or flavour.refuses(comm.direct)
    return f"unavailable: {reason}" if reason else "available"
