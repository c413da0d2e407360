"""The table of all flavours, and the collectives that each flavour can carry out here.

A new flavour needs a file in ``flavours/`` and a row in ``FLAVOURS``.
"""

from __future__ import annotations

import dataclasses
import textwrap

from torchmpi_py.collectives.flavour import Flavour
from torchmpi_py.collectives.flavours.cudaipc import CudaIpc
from torchmpi_py.collectives.flavours.hierarchical import Hierarchical, Members
from torchmpi_py.collectives.flavours.mpi import Mpi
from torchmpi_py.collectives.flavours.ring import Ring
from torchmpi_py.collectives.flavours.shared import Shared
from torchmpi_py.collectives.flavours.staged import Staged
from torchmpi_py.collectives.flavours.torch_group import Gloo, Nccl
from torchmpi_py.core import text_tables
from torchmpi_py.core.collective import COLLECTIVES
from torchmpi_py.core.communicators import Communicator, resolve

FLAVOURS: tuple[Flavour, ...] = (  # The selector uses the first flavour for calls without a row in its table.
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
    """Whether one flavour can carry out one collective for tensors on one type of device.

    Args:
        verb (str): name of the collective.
        device (str): "cpu" or "cuda".
        flavour (str): name of the flavour.
        status (str): "available", "unimplemented", or "unavailable: " and the reason.
    """

    verb: str
    device: str
    flavour: str
    status: str


class Table(tuple[AvailabilityRow, ...]):
    """The rows of ``availability``; ``str`` returns a matrix of collectives and flavours for each type of device."""

    def __str__(self) -> str:
        cells = {"available": "yes", "unimplemented": "-"}  # the cell of each status
        for row in self:
            cells.setdefault(row.status, f"no {len(cells) - 1}")
        blocks = []
        for device in DEVICES:
            rows: dict[str, list[str]] = {}
            for row in self:
                if row.device == device:
                    rows.setdefault(row.verb, [row.verb]).append(cells[row.status])
            blocks.append(text_tables.table([f"on {device}", *BY_NAME], list(rows.values())))
        legend = ["yes: available, -: not implemented by the flavour, no: unavailable, for the reason below"]
        for status, cell in list(cells.items())[2:]:
            legend += textwrap.wrap(f"{cell}: {status.removeprefix('unavailable: ')}", 100, subsequent_indent="      ")
        return "\n\n".join([*blocks, "\n".join(legend)])


def availability(comm: Communicator | None = None) -> Table:
    """Return whether each flavour can carry out each collective on a communicator, and if not, why.

    Any rank may call this alone. ``print(mpi.availability())`` shows a matrix of collectives and flavours.

    Args:
        comm (Communicator): communicator to examine; default None, the current level.

    Returns:
        A tuple of rows with the attributes ``verb``, ``device``, ``flavour`` and ``status``. A status is "available",
            "unimplemented", or "unavailable: " and the reason.

    Raises:
        NotStarted: ``mpi.start()`` was not called.
        CommunicatorError: ``comm`` was freed.

    Examples:
        >>> rows = mpi.availability()
        >>> [row.status for row in rows if (row.verb, row.device, row.flavour) == ("allreduce", "cpu", "mpi")]
        ['available']
    """
    comm = resolve(comm)
    return Table(
        AvailabilityRow(verb, device, flavour.name, status(flavour, verb, device, comm))
        for verb in COLLECTIVES
        for device in DEVICES
        for flavour in FLAVOURS
    )


def status(flavour: Flavour, verb: str, device: str, comm: Communicator) -> str:
    """Return "available", "unimplemented", or "unavailable: " and the reason."""
    if not flavour.implements(verb):
        return "unimplemented"
    if device not in flavour.devices:
        return f"unavailable: serves {', '.join(sorted(flavour.devices))} tensors only"
    reason = flavour.missing(device) or flavour.refuses(comm.direct)
    return f"unavailable: {reason}" if reason else "available"
