"""The GPU on which each rank computes, and the ranks that can map each other's GPU memory.

Ranks form an *IPC group* if they are on one node and each pair of them shares a GPU, or has GPUs that access each
other's memory directly (peer access). A process reaches only the GPUs that it sees. If every rank sees only its own
GPU, no rank can map another's memory.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torchmpi_py.core.channels import Place
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree


class Gpu(NamedTuple):
    """A rank's GPU: its identity, equal in all processes, and the lowest rank of its IPC group."""

    identity: str
    group: int


class GpuOffer(NamedTuple):
    """A rank's announcement: its place, its GPU, and the GPUs that this GPU reaches (including itself)."""

    place: Place
    identity: str
    reached: frozenset[str]


_SWITCHED_OFF = "switched off by start(with_ipc_groups=False)"


@dataclasses.dataclass
class GpuTable:
    """The GPU of each world rank, by the rank's place.

    ``why_no_ipc`` says why ranks cannot map each other's GPU memory; it is empty if they can.
    """

    gpus: Mapping[Place, Gpu]
    why_no_ipc: str


current: GpuTable | None = None
"""The table of the session; None unless ``start(with_cuda=True)``. Only a session assigns it."""


def exchange(world: MPI.Comm, place: Place, device: torch.device, *, with_ipc: bool) -> GpuTable | None:
    """Return the table of all ranks of ``world``; None if all compute on the CPU. Collective over ``world``.

    Raise RanksDisagree on every rank if some ranks compute on the CPU and others do not.
    """
    offers = world.allgather(_offer(place, device) if device.type == "cuda" else None)
    without = [rank for rank, offer in enumerate(offers) if offer is None]
    if len(without) == len(offers):
        return None
    if without:
        ranks = ", ".join(map(str, without))
        raise RanksDisagree(f"start: with_cuda=False on rank {ranks}, with_cuda=True on the others; pass one value")
    gpus = {offer.place: Gpu(offer.identity, group) for offer, group in zip(offers, ipc_groups(offers), strict=True)}
    return GpuTable(gpus, "" if with_ipc else _SWITCHED_OFF)


def switch_off(reason: str) -> None:
    """Keep ranks from mapping each other's GPU memory. All ranks call this before ``start`` pushes the IPC level."""
    assert current is not None, "the GPUs of a session"
    current.why_no_ipc = reason


def table() -> dict[Place, str] | None:
    """Return the identity of every world rank's GPU by place; None unless ``start(with_cuda=True)``."""
    return None if current is None else {place: gpu.identity for place, gpu in current.gpus.items()}


def group(place: Place) -> int:
    """Return a rank's IPC group as its lowest world rank. On the CPU all ranks of a node form one group."""
    return place.node if current is None or current.why_no_ipc else current.gpus[place].group


def why_no_ipc(places: Sequence[Place] = ()) -> str:
    """Return why the ranks at ``places`` cannot map each other's GPU memory, or "". These ranks get the same text."""
    if current is None:
        return "this session computes on the CPU; call mpi.start(with_cuda=True) on every rank"
    if current.why_no_ipc:
        return current.why_no_ipc
    if len({group(place) for place in places}) > 1:
        names = ", ".join(sorted({current.gpus[place].identity for place in places}))
        return (
            f"the GPUs of these ranks cannot all reach each other's memory ({names}); within an IPC group they can, "
            "see set_collective_span. Let each rank see all GPUs of its node (CUDA_VISIBLE_DEVICES), not only its own"
        )
    return ""


def ipc_groups(offers: Sequence[GpuOffer]) -> list[int]:
    """Return the lowest rank of each rank's IPC group; a rank joins the first group whose members it all reaches."""
    groups: dict[int, list[list[int]]] = {}  # by node
    for rank, mine in enumerate(offers):
        for members in (here := groups.setdefault(mine.place.node, [])):
            if all(_reach_each_other(mine, offers[member]) for member in members):
                members.append(rank)
                break
        else:
            here.append([rank])
    lowest = {rank: members[0] for here in groups.values() for members in here for rank in members}
    return [lowest[rank] for rank in range(len(offers))]


def _reach_each_other(one: GpuOffer, other: GpuOffer) -> bool:
    return one.identity in other.reached and other.identity in one.reached


def _offer(place: Place, device: torch.device) -> GpuOffer:
    own = device.index or 0
    reached = {
        identity(index)
        for index in range(torch.cuda.device_count())
        if index == own or torch.cuda.can_device_access_peer(own, index)
    }
    return GpuOffer(place, identity(own), frozenset(reached))


def identity(index: int) -> str:
    """Return the identity of a GPU, equal in every process whatever GPUs it sees and in which order."""
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)  # A MIG instance has a UUID of its own.
    return f"GPU-{uuid}" if uuid is not None else f"{properties.name} {index} of {socket.gethostname()}"
