"""Which GPU every rank computes on, and which ranks can map each other's GPU memory.

Ranks are in one *IPC group* if they are on one node and each pair of them shares a GPU, or has GPUs that reach each
other's memory directly (peer access). A GPU counts as reached only if it is visible to the process as well: where
every rank sees its own GPU alone, those of others cannot be mapped.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchmpi_py.core.channels import Place
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree


class Gpu(NamedTuple):
    """What a rank computes on: the GPU's identity, the same for all processes, and the lowest rank of the IPC group."""

    identity: str
    group: int


class Told(NamedTuple):
    """What a rank tells the others: its place, its GPU, and the GPUs that this one reaches, itself included."""

    place: Place
    identity: str
    reached: frozenset[str]


_gpus: dict[Place, Gpu] | None = None
_with_ipc = True
_SWITCHED_OFF = "switched off by start(with_ipc_groups=False)"
_why_off = _SWITCHED_OFF


def install(world: MPI.Comm, place: Place, device: torch.device, *, with_ipc: bool) -> None:
    """Tell all ranks what each of them computes on. Collective over ``world``. On the CPU there is no table.

    RanksDisagree, on every rank, if some compute on the CPU and others do not.
    """
    global _gpus, _with_ipc, _why_off
    _gpus, _with_ipc, _why_off = None, with_ipc, _SWITCHED_OFF
    mine = _told(place, device) if device.type == "cuda" else None
    told = world.allgather(mine)
    without = [rank for rank, each in enumerate(told) if each is None]
    if len(without) == len(told):
        return
    if without:
        ranks = ", ".join(map(str, without))
        raise RanksDisagree(f"start: with_cuda=False on rank {ranks}, with_cuda=True on the others; give all the same")
    groups = ipc_groups(told)
    _gpus = {each.place: Gpu(each.identity, group) for each, group in zip(told, groups, strict=True)}


def switch_off(reason: str) -> None:
    """No ranks map each other's GPU memory from now on. On all ranks, before levels are made of groups."""
    global _with_ipc, _why_off
    _with_ipc, _why_off = False, reason


def forget() -> None:
    """There is no table any more."""
    global _gpus
    _gpus = None


def table() -> dict[Place, str] | None:
    """The identity of the GPU of every rank of the world, by its place; None unless ``start(with_cuda=True)``."""
    return None if _gpus is None else {place: gpu.identity for place, gpu in _gpus.items()}


def group(place: Place) -> int:
    """The IPC group of a rank: the lowest rank of the world in it. On the CPU all of a node are together."""
    return place.node if _gpus is None or not _with_ipc else _gpus[place].group


def why_no_ipc(places: Sequence[Place] = ()) -> str:
    """Why ranks, those at ``places``, cannot map each other's GPU memory; or empty. The same on all of them."""
    if _gpus is None:
        return "this session computes on the CPU; call mpi.start(with_cuda=True) on every rank"
    if not _with_ipc:
        return _why_off
    if len({group(place) for place in places}) > 1:
        names = ", ".join(sorted({_gpus[place].identity for place in places}))
        return (
            f"the GPUs of these ranks cannot all reach each other's memory ({names}); within IPC groups they can, see "
            "set_collective_span. Ranks must see all GPUs of the node, not only their own (CUDA_VISIBLE_DEVICES)"
        )
    return ""


def ipc_groups(told: Sequence[Told]) -> list[int]:
    """For every rank the lowest rank of its IPC group: the first group whose members it reaches, and they it."""
    groups: list[list[int]] = []
    for rank, mine in enumerate(told):
        for members in groups:
            if all(_together(mine, told[member]) for member in members):
                members.append(rank)
                break
        else:
            groups.append([rank])
    lowest = {rank: members[0] for members in groups for rank in members}
    return [lowest[rank] for rank in range(len(told))]


def _together(one: Told, other: Told) -> bool:
    return one.place.node == other.place.node and one.identity in other.reached and other.identity in one.reached


def _told(place: Place, device: torch.device) -> Told:
    own = device.index or 0
    reached = {
        identity(index)
        for index in range(torch.cuda.device_count())
        if index == own or torch.cuda.can_device_access_peer(own, index)
    }
    return Told(place, identity(own), frozenset(reached))


def identity(index: int) -> str:
    """The same in every process, whatever the order and number of the GPUs that it sees."""
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)  # of a MIG instance: its own
    return f"GPU-{uuid}" if uuid is not None else f"{properties.name} {index} of {socket.gethostname()}"
