"""The GPU on which each rank computes, and the ranks that can map each other's GPU memory.

Ranks form an *IPC group* if they are on one node, and each pair of ranks shares a GPU or has GPUs that access each
other's memory directly (peer access). A process can use only the GPUs that are visible to it. If each rank sees
only one GPU, ranks can map each other's GPU memory only if they use the same GPU.
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
    """A rank's GPU: its identity, which is the same in all processes, and the lowest world rank of its IPC group."""

    identity: str
    group: int


class GpuOffer(NamedTuple):
    """Facts that a rank sends to all ranks: its place, its GPU, and the GPUs whose memory its GPU can access.

    ``reached`` includes the rank's own GPU.
    """

    place: Place
    identity: str
    reached: frozenset[str]


_SWITCHED_OFF = "start(with_ipc_groups=False) has disabled CUDA IPC; to use it, omit with_ipc_groups"


@dataclasses.dataclass
class GpuTable:
    """The GPU of each world rank, by the rank's place.

    ``why_no_ipc`` is the reason why ranks cannot map each other's GPU memory, or "" if they can.
    """

    gpus: Mapping[Place, Gpu]
    why_no_ipc: str


current: GpuTable | None = None
"""The table of the session, or None without ``start(with_cuda=True)``. Only a session assigns it."""


def exchange(world: MPI.Comm, place: Place, device: torch.device, *, with_ipc: bool) -> GpuTable | None:
    """Return the table of all ranks of ``world``, or None if all ranks compute on the CPU.

    All ranks of ``world`` must call it. Raise RanksDisagree on every rank if only some ranks compute on the CPU.
    """
    offers = world.allgather(_offer(place, device) if device.type == "cuda" else None)
    without = [rank for rank, offer in enumerate(offers) if offer is None]
    if len(without) == len(offers):
        return None
    if without:
        ranks = ", ".join(map(str, without))
        raise RanksDisagree(f"start: with_cuda=False on rank {ranks}, True on other ranks; pass the same value on all")
    gpus = {offer.place: Gpu(offer.identity, group) for offer, group in zip(offers, ipc_groups(offers), strict=True)}
    return GpuTable(gpus, "" if with_ipc else _SWITCHED_OFF)


def switch_off(reason: str) -> None:
    """Disable GPU IPC for the session. All ranks must call this before ``start`` creates the level of IPC groups."""
    assert current is not None, "the GPUs of a session"
    current.why_no_ipc = reason


def table() -> dict[Place, str] | None:
    """Return the identity of every world rank's GPU by place, or None without ``start(with_cuda=True)``."""
    return None if current is None else {place: gpu.identity for place, gpu in current.gpus.items()}


def group(place: Place) -> int:
    """Return the lowest world rank of a rank's IPC group. Without IPC, all ranks of a node form one group."""
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
            f"the GPUs of these ranks cannot all reach each other's memory ({names}). Make all GPUs of a node visible "
            "to each rank (CUDA_VISIBLE_DEVICES), or use cudaipc within IPC groups only (see set_collective_span)"
        )
    return ""


def ipc_groups(offers: Sequence[GpuOffer]) -> list[int]:
    """Return the lowest rank of each rank's IPC group.

    A rank joins the first group of its node in which it and every member reach each other's GPU memory.
    """
    groups: dict[int, list[list[int]]] = {}  # the members of each group, by node
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
    """Return the identity of a GPU: its UUID, which is the same in every process whatever CUDA_VISIBLE_DEVICES is.

    Older versions of torch do not provide the UUID. In this case the identity consists of name, index and host.
    """
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)  # Each MIG instance has its own UUID.
    return f"GPU-{uuid}" if uuid is not None else f"{properties.name} {index} of {socket.gethostname()}"
