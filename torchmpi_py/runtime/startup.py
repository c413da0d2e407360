"""The levels with which a started process begins: the user's own, and those of nodes or IPC groups.

What ``start`` builds on top of MPI, and ``stop`` takes down again: memory, communicators, threads, levels.

It is built on any communicator: the world, or what is left of it when ranks have died (``survivors.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchmpi_py.collectives import measured_cache
from torchmpi_py.collectives.flavours import gpu_probe, rendezvous
from torchmpi_py.collectives.flavours.node_group import part_bytes
from torchmpi_py.core import agree, communication_thread, communicators, config, status_board, ulfm
from torchmpi_py.core.channels import Place
from torchmpi_py.core.communicators import Communicator, Stack
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.launch import variables
from torchmpi_py.memory import gpus, symmetric
from torchmpi_py.runtime import placement
from torchmpi_py.watch import tracing, watchdog


def push(custom: Callable[[], int] | None, collective: Callable[[], int | None] | None) -> None:
    """The user's levels, then those for hierarchical collectives; the span is between the two. Collective."""
    stack = communicators.stack()
    entry = 0 if custom is None else custom()
    communicators.set_communicator(_checked_level("custom_communicator_init", entry))
    if collective is None:
        group, node = gpus.group(stack.place), stack.place.node
        end = stack.push(f"node of rank {node}" if group == node else f"IPC group of rank {group}")
    else:
        given = collective()
        end = entry if given is None else _checked_level("collective_communicator", given)
        communicators.set_communicator(entry)
    communicators.set_collective_span(entry, end)


def _checked_level(what: str, level: object) -> int:
    if isinstance(level, bool) or not isinstance(level, int):
        raise TypeError(f"{what} returned {level!r}; it must return the index of the deepest level that it pushed")
    communicators.stack().level(level)
    return level


logger = logging.getLogger("torchmpi_py")


class StartOptions(NamedTuple):
    """What ``start`` was asked for."""

    device: torch.device
    with_ipc: bool
    custom_levels: Callable[[], int] | None
    cartesian: bool
    collective_levels: Callable[[], int | None] | None
    tuning: config.Tuning
    has_settled: bool = False  # the device is that of a rank that goes on


start_options: StartOptions | None = None
remaining: MPI.Comm | None = None  # the world, where ranks have died
device = torch.device("cpu")
_node: Communicator | None = None
_local: placement.Local | None = None


def build(world: MPI.Comm, wanted: StartOptions) -> None:
    """Everything between MPI and the program. Collective over ``world``."""
    global start_options
    start_options = wanted
    _build(world, wanted)
    whole = communicators.stack().levels[0]
    _complete_variables(whole)
    if gpus.table() is not None:
        gpu_probe.run(whole.direct, device)
        gpu_probe.probe(whole)
    measured_cache.load_for(whole)
    push(wanted.custom_levels, wanted.collective_levels)
    tracing.start(whole)
    watchdog.start()


def check_tuning(world: MPI.Comm, tuning: config.Tuning) -> None:
    """RanksDisagree if the ranks were given different tunings. Collective."""
    tunings = world.allgather(tuning)
    if (rank := agree.first_different(tunings)) is not None:
        raise RanksDisagree(
            f"start: rank 0 has {tunings[0]}, rank {rank} has {tunings[rank]}; set TORCHMPI_* alike on all hosts"
        )


def _build(world: MPI.Comm, wanted: StartOptions) -> None:
    """Everything but the levels below the world."""
    global _node, _local, device

    config.install(wanted.tuning)
    inline = MPI.Query_thread() < MPI.THREAD_MULTIPLE
    if inline and world.rank == 0:
        logger.warning("this MPI does not give MPI_THREAD_MULTIPLE: asynchronous operations run when they are launched")
    communication_thread.install(communication_thread.CommunicationThread(inline=inline))
    node_group = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    place = Place(node_group.bcast(world.rank), node_group.rank)
    _node = Communicator(node_group, place, f"node of rank {place.node}")
    status_board.install(status_board.Board(node_group, _node.direct.places, world.rank))
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
    ulfm.revoke_all()
    if communication_thread.is_installed():
        communication_thread.current().close()
    if communicators.is_started():
        communicators.stack().free(is_lost=True)
    if _node is not None:
        _node._give_back(is_lost=True)
    symmetric.forget()
    ulfm.forget_all()
    _forget(why_not)


def _forget(why_not: str) -> None:
    global _node, _local
    _node = _local = None
    communication_thread.install(None)
    symmetric.close()
    status_board.install(None)
    gpus.forget()
    communicators.install(None, why_not)


def located() -> placement.Local:
    """This rank's place on its node."""
    communicators.stack()
    assert _local is not None, "a started process is located"
    return _local
