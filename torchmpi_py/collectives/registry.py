"""Every flavour of the package, in one list; what each can do here, and why not."""

from __future__ import annotations

import dataclasses
import functools

import torch

from torchmpi_py.collectives.flavour import VERBS, Flavour
from torchmpi_py.collectives.mpi import Mpi
from torchmpi_py.errors import Unavailable, Unimplemented

FLAVOURS: tuple[Flavour, ...] = (Mpi(),)  # in order of preference
_BY_NAME = {flavour.name: flavour for flavour in FLAVOURS}


@functools.cache
def flavour_for(verb: str, device: torch.device, name: str | None) -> Flavour:
    """The flavour called ``name``, or the first that serves ``verb`` on ``device``; else an error that says why not.

    A name is an order: no other flavour takes its place.
    """
    if name is not None and name not in _BY_NAME:
        raise ValueError(f"{verb}: flavour {name!r} is unknown; known flavours: {', '.join(_BY_NAME)}")
    candidates = FLAVOURS if name is None else (_BY_NAME[name],)
    reasons = []
    for flavour in candidates:
        if flavour.implements(verb) and device.type in flavour.devices and not flavour.missing():
            return flavour
        reasons.append(f"{flavour.name}: {_status(flavour, verb, device.type)}")
    kind = Unimplemented if name is not None and not candidates[0].implements(verb) else Unavailable
    raise kind(f"{verb} of a tensor on {device}: no flavour can do it ({'; '.join(reasons)})")


@dataclasses.dataclass(frozen=True)
class Row:
    """One flavour, verb and device type."""

    verb: str
    device: str
    flavour: str
    status: str


class Table(tuple[Row, ...]):
    """The rows; print it for a table."""

    def __str__(self) -> str:
        lines = [f"{'verb':17} {'device':7} {'flavour':13} status"]
        return "\n".join(lines + [f"{row.verb:17} {row.device:7} {row.flavour:13} {row.status}" for row in self])


def availability() -> Table:
    """What every flavour can do here: a table of verb, device, flavour and status, with the reason for every "no"."""
    return Table(
        Row(verb, device, flavour.name, _status(flavour, verb, device))
        for verb in VERBS
        for device in ("cpu", "cuda")
        for flavour in FLAVOURS
    )


def _status(flavour: Flavour, verb: str, device: str) -> str:
    if not flavour.implements(verb):
        return "unimplemented"
    if device not in flavour.devices:
        return f"unavailable: serves {', '.join(sorted(flavour.devices))} tensors only"
    reason = flavour.missing()
    return f"unavailable: {reason}" if reason else "available"
