"""What ``start`` builds on top of MPI, and ``stop`` takes down again: memory, communicators, threads, levels.

It is built on any communicator: the world, or what is left of it when ranks have died (``survivors.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchmpi_py import (
    board,
    communication_thread,
    communicators,
    config,
    gpus,
    levels,
    placement,
    recovery,
    symmetric,
    tracing,
    watchdog,
)
from torchmpi_py.channels import Place
from torchmpi_py.collectives import cuda_aware, ipc_trial, rendezvous, tuning_file
from torchmpi_py.collectives.node_group import part_bytes
from torchmpi_py.communicators import Communicator, Stack
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.launch import world as variables

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("torchmpi_py")


class Wishes(NamedTuple):
    """What ``start`` was asked for."""

    device: torch.device
    with_ipc: bool
    custom_levels: Callable[[], int] | None
    cartesian: bool
    collective_levels: Callable[[], int | None] | None
    tuning: config.Tuning
    has_settled: bool = False  # the device is that of a rank that goes on


wishes: Wishes | None = None
remaining: MPI.Comm | None = None  # the world, where ranks have died
device = torch.device("cpu")
_node: Communicator | None = None
_local: placement.Local | None = None


def build(world: MPI.Comm, wanted: Wishes) -> None:
    """Everything between MPI and the program. Collective over ``world``."""
    global wishes
    wishes = wanted
    _build(world, wanted)
    whole = communicators.stack().levels[0]
    _complete_variables(whole)
    if gpus.table() is not None:
        ipc_trial.run(whole.direct, device)
        cuda_aware.probe(whole)
    tuning_file.load_for(whole)
    levels.push(wanted.custom_levels, wanted.collective_levels)
    tracing.start(whole)
    watchdog.start()


def _build(world: MPI.Comm, wanted: Wishes) -> None:
    """Everything but the levels below the world."""
    global _node, _local, device
    from mpi4py import MPI

    tuning = wanted.tuning
    tunings = world.allgather(tuning)
    if any(other != tunings[0] for other in tunings):
        rank, other = next((rank, other) for rank, other in enumerate(tunings) if other != tunings[0])
        raise RanksDisagree(
            f"start: rank 0 has {tunings[0]}, rank {rank} has {other}; set TORCHMPI_* alike on all hosts"
        )
    config.install(tuning)
    inline = MPI.Query_thread() < MPI.THREAD_MULTIPLE
    if inline and world.rank == 0:
        logger.warning("this MPI does not give MPI_THREAD_MULTIPLE: asynchronous operations run when they are launched")
    communication_thread.install(communication_thread.CommunicationThread(inline=inline))
    node_group = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    place = Place(node_group.bcast(world.rank), node_group.rank)
    _node = Communicator(node_group, place, f"node of rank {place.node}")
    board.install(board.Board(node_group, _node.direct.places, world.rank))
    symmetric.try_out(node_group, _node.direct.places, part_bytes())
    _local = placement.locate(node_group)
    device = wanted.device if wanted.has_settled else placement.settled(wanted.device, _local)
    placement.limit_threads(_local)
    gpus.install(world, place, device, with_ipc=wanted.with_ipc)
    communicators.install(Stack(world, place, wanted.cartesian), "")


def _complete_variables(whole: Communicator) -> None:
    """Add to torchrun's variables what launchers do not say of several nodes: rank 0's address, this node's index.

    Collective.
    """
    if whole.num_nodes > 1:
        address = whole.direct.mpi.bcast(rendezvous.own_address(whole.num_nodes) if whole.rank == 0 else "")
        nodes = [place.node for place in whole.direct.places]
        variables.complete(address, sorted(set(nodes)).index(nodes[whole.rank]))


def tear_down(why_not: str) -> None:
    """Give everything back; ``why_not`` is what calls are told from now on. Collective."""
    communication_thread.current().close()
    communicators.stack().free()
    if _node is not None:
        _node._give_back()
    watchdog.stop()
    _forget(why_not)


def abandon(why_not: str) -> None:
    """Let go of everything, for ranks have died: what is under way fails, on all ranks. Not collective."""
    watchdog.stop()
    recovery.revoke_all()
    if communication_thread.is_installed():
        communication_thread.current().close()
    if communicators.is_started():
        communicators.stack().free(is_lost=True)
    if _node is not None:
        _node._give_back(is_lost=True)
    symmetric.forget()
    recovery.forget_all()
    _forget(why_not)


def _forget(why_not: str) -> None:
    global _node, _local
    _node = _local = None
    communication_thread.install(None)
    symmetric.close()
    board.install(None)
    gpus.forget()
    communicators.install(None, why_not)


def located() -> placement.Local:
    """This rank's place on its node."""
    communicators.stack()
    assert _local is not None, "a started process is located"
    return _local
