"""Which GPU every rank computes on, and which ranks can map each other's GPU memory.

Ranks are in one *IPC group* if they are on one node and each pair of them shares a GPU, or has GPUs that reach each
other's memory directly (peer access). A GPU counts as reached only if the process sees it as well: where every rank
sees its own GPU alone, no rank can map another's memory.
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
    """A rank's GPU: the identity, the same for all processes, and the lowest rank of the IPC group."""

    identity: str
    group: int


class GpuOffer(NamedTuple):
    """A rank's announcement: its place, its GPU, and the GPUs that this GPU reaches, itself included."""

    place: Place
    identity: str
    reached: frozenset[str]


_SWITCHED_OFF = "switched off by start(with_ipc_groups=False)"


@dataclasses.dataclass
class GpuTable:
    """The GPU of every rank of the world, by its place; ``why_no_ipc``: why ranks map no GPU memory of others."""

    gpus: Mapping[Place, Gpu]
    why_no_ipc: str


current: GpuTable | None = None
"""The table of the session; None unless ``start(with_cuda=True)``. A session alone assigns it."""


def exchange(world: MPI.Comm, place: Place, device: torch.device, *, with_ipc: bool) -> GpuTable | None:
    """The table of all ranks of ``world``; None if all compute on the CPU. Collective over ``world``.

    RanksDisagree, on every rank, if some compute on the CPU and others do not.
    """
    offers = world.allgather(_offer(place, device) if device.type == "cuda" else None)
    without = [rank for rank, offer in enumerate(offers) if offer is None]
    if len(without) == len(offers):
        return None
    if without:
        ranks = ", ".join(map(str, without))
        raise RanksDisagree(f"start: with_cuda=False on rank {ranks}, with_cuda=True on the others; give all the same")
    gpus = {offer.place: Gpu(offer.identity, group) for offer, group in zip(offers, ipc_groups(offers), strict=True)}
    return GpuTable(gpus, "" if with_ipc else _SWITCHED_OFF)


def switch_off(reason: str) -> None:
    """Let no ranks map each other's GPU memory. All ranks call this, before ``start`` makes a level of the groups."""
    assert current is not None, "the GPUs of a session"
    current.why_no_ipc = reason


def table() -> dict[Place, str] | None:
    """The identity of the GPU of every rank of the world, by its place; None unless ``start(with_cuda=True)``."""
    return None if current is None else {place: gpu.identity for place, gpu in current.gpus.items()}


def group(place: Place) -> int:
    """The IPC group of a rank: the lowest rank of the world in it. On the CPU all ranks of a node are one group."""
    return place.node if current is None or current.why_no_ipc else current.gpus[place].group


def why_no_ipc(places: Sequence[Place] = ()) -> str:
    """Why the ranks at ``places`` cannot map each other's GPU memory, or empty; the same text on all of them."""
    if current is None:
        return "this session computes on the CPU; call mpi.start(with_cuda=True) on every rank"
    if current.why_no_ipc:
        return current.why_no_ipc
    if len({group(place) for place in places}) > 1:
        names = ", ".join(sorted({current.gpus[place].identity for place in places}))
        return (
            f"the GPUs of these ranks cannot all reach each other's memory ({names}); within IPC groups they can, see "
            "set_collective_span. Ranks must see all GPUs of the node, not only their own (CUDA_VISIBLE_DEVICES)"
        )
    return ""


def ipc_groups(offers: Sequence[GpuOffer]) -> list[int]:
    """The lowest rank of every rank's IPC group: the first group in which all reach the rank, and the rank all."""
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
    """The identity of a GPU: the same in every process, whatever the order and number of the GPUs there."""
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)  # a MIG instance has its own
    return f"GPU-{uuid}" if uuid is not None else f"{properties.name} {index} of {socket.gethostname()}"
