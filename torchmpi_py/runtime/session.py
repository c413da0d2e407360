"""The session: the state that ``start`` builds on top of MPI, until ``stop`` or the death of a rank removes it.

The parts of a session, in the order of their construction:

- tuning: ``config.current``
- communication thread: ``communication_thread.current_thread``
- node: the communicator of this node's ranks, and this rank's place on the node
- board: ``status_board.current``
- symmetric memory: whether the ranks of this node can share memory
- GPU table: ``gpus.current``
- level stack: ``communicators.current_stack``
- nodes: ``node_links.current``, if there are several nodes
- watchdog: owned by the session; it also watches the construction of the parts that follow
- levels of the user: the levels below level 0
- trace: ``tracing.current``

Lower layers read these module variables, and only a session assigns them. A session can be built on any communicator:
the world, or the survivors after other ranks have died (``survivors.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import torchmpi_py
from torchmpi_py.collectives import measured_cache
from torchmpi_py.collectives.flavours import gpu_probe, rendezvous
from torchmpi_py.collectives.flavours.node_group import part_bytes
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core import agree, communication_thread, communicators, config, journal, status_board, ulfm
from torchmpi_py.core.channels import Place
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.communicators import Communicator, Stack
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.status_board import Board
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.launch import variables
from torchmpi_py.memory import gpus, symmetric
from torchmpi_py.runtime import arrival, placement
from torchmpi_py.watch import kept_boards, node_links, tracing
from torchmpi_py.watch.watchdog import Watchdog

logger = logging.getLogger("torchmpi_py")


class StartOptions(NamedTuple):
    """The arguments of ``start``, with the device and the tuning resolved."""

    device: torch.device
    with_ipc: bool
    custom_levels: Callable[[], int] | None
    cartesian: bool
    collective_levels: Callable[[], int | None] | None
    tuning: config.Tuning


class Session:
    """The parts of one session. After a death, call ``close``, and then ``build`` with a smaller world."""

    def __init__(self, options: StartOptions) -> None:
        self.options = options
        self.device = options.device
        self.local: placement.Local | None = None
        self.described_ns = 0  # time at which ``kept_boards`` described this session
        self._node: Communicator | None = None
        self._watchdog: Watchdog | None = None

    def build(self, world: MPI.Comm) -> None:
        """Build all parts on ``world``. All ranks of ``world`` must make this call.

        After an error the parts that were built remain, and ``close`` removes them.
        """
        ulfm.num_acknowledged = MPI.COMM_WORLD.size - world.size
        self._build_parts(world)
        whole = communicators.stack().levels[0]
        assert status_board.current is not None, "_build_parts has built it"
        # Between nodes the watchdogs exchange messages over separate connections, not over MPI.
        address = rendezvous.own_address(whole.num_nodes)
        node_links.current, listener = node_links.introduce(whole.direct, address)
        self._watchdog = Watchdog(status_board.current, config.current, node_links.current, listener)
        self._watchdog.least_seconds = arrival.LEAST_SECONDS
        # From here on, the ranks call collectives and the user's functions.
        _complete_variables(whole)
        if gpus.table() is not None:
            gpu_probe.run(whole.direct, self.device)
            gpu_probe.why_no_gpu_memory = gpu_probe.probe(whole)
        measured_cache.load_for(whole)
        _push_levels(self.options.custom_levels, self.options.collective_levels)
        tracing.current = tracing.start(whole)
        self.described_ns = kept_boards.describe(whole)
        self._watchdog.least_seconds = 0.0

    def location(self) -> placement.Local:
        """Return this rank's place on its node."""
        assert self.local is not None, "an open session has located its rank"
        return self.local

    def _build_parts(self, world: MPI.Comm) -> None:
        """Build the parts that collectives need, up to level 0 of the stack. All ranks must make this call."""
        inline = MPI.Query_thread() < MPI.THREAD_MULTIPLE
        _use_tuning(self.options.tuning, inline=inline, logs=world.rank == 0)
        communication_thread.current_thread = CommunicationThread(inline=inline)
        node = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
        place = Place(node.bcast(world.rank), node.rank)
        self._node = Communicator(node, place, f"node of rank {place.node}")
        status_board.current = Board(node, self._node.direct.places, world.rank, kept_boards.replaced(world.rank))
        symmetric.unavailable_because = symmetric.try_out(node, self._node.direct.places, part_bytes())
        is_first_time = self.local is None
        self.local = placement.locate(node)
        if is_first_time:  # After a death a rank keeps its GPU, even if its place is different.
            self.device = placement.corrected_device(self.options.device, self.local)
        placement.limit_threads(self.local)
        selector.use_cores(self.local.node_cores)
        gpus.current = gpus.exchange(world, place, self.device, with_ipc=self.options.with_ipc)
        communicators.current_stack, communicators.why_not = Stack(world, place, self.options.cartesian), ""

    def close(self, why_not: str, *, is_lost: bool = False) -> None:
        """Remove all parts, so that later calls raise NotStarted with ``why_not``.

        All ranks must make this call, unless ``is_lost`` is True, which means that ranks have died. In that case each
        rank makes the call alone, and pending calls fail on all ranks.
        """
        # 1. In a lost world no operation can complete. So stop hang detection, and make pending calls raise.
        if is_lost:
            self._stop_watchdog()
            ulfm.revoke_all()
        # 2. Free the parts that all ranks free together. The watchdog still runs, in case a rank never does so.
        if is_lost or communicators.current_stack is None:
            self._free_parts(is_lost=is_lost)
        else:
            world = communicators.current_stack.levels[0]
            journal.run_alone("mpi.stop()", world, lambda: self._free_parts(is_lost=False))
        if is_lost:  # The program may still refer to tensors and communicators of the lost world.
            symmetric.live.clear()
            ulfm.forget_all()
        self._stop_watchdog()
        # 3. Free the parts that belong to this rank alone.
        self._node = None
        communication_thread.current_thread = None
        tracing.current = None
        symmetric.unavailable_because = symmetric.NOT_STARTED
        if status_board.current is not None:
            # Break a reference cycle: the calls refer to sequences, which refer to the board.
            status_board.current.calls.clear()
            status_board.current = None
        gpus.current = None
        communicators.current_stack, communicators.why_not = None, why_not

    def _free_parts(self, *, is_lost: bool) -> None:
        """End the communication thread, whose operations use the communicators, and then free the communicators."""
        if communication_thread.current_thread is not None:
            communication_thread.current_thread.close()
        if communicators.current_stack is not None:
            communicators.current_stack.free(is_lost=is_lost)
        if self._node is not None:
            if gpus.current is not None and not is_lost:
                symmetric.unmap_peers(self._node.direct.mpi)
            self._node._release(is_lost=is_lost)

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
            node_links.current = None


_current: Session | None = None  # the last session of this process, open or closed

remaining_world: MPI.Comm | None = None
"""The communicator of the survivors, or None if no rank has died. MPI.COMM_WORLD contains dead ranks, even in later
sessions."""


def open_session(world: MPI.Comm, options: StartOptions) -> None:
    """Build the session of this process on ``world``. All ranks of ``world`` must make this call."""
    global _current
    _current = Session(options)
    try:
        _current.build(world)
    except BaseException:
        if world.size == 1 and communicators.is_started():
            _current.close("call mpi.start() first")
        raise


def current() -> Session:
    """Return the open session, or raise NotStarted."""
    communicators.stack()
    assert _current is not None, "a session is open"
    return _current


@contextlib.contextmanager
def narrowed(group: MPI.Comm) -> Iterator[Stack]:
    """Make ``group`` the world inside a ``with`` block: level 0 of a new stack, which the block receives.

    All ranks of ``group`` must enter the block. The caller must free the stack.
    """
    outer = communicators.stack()
    communicators.current_stack = Stack(group, outer.place, outer.want_cartesian, outer)
    try:
        _push_levels(None, None)
        yield communicators.current_stack
    finally:
        communicators.current_stack = outer


def check_same(world: MPI.Comm, tuning: config.Tuning) -> None:
    """Raise RanksDisagree if the ranks have different versions of this package or different tunings.

    All ranks must make this call. Rank 0 logs a warning if the versions of torch or MPI differ. The ranks gather four
    texts that every version of this package can read. The texts take about 130 bytes per rank, because the text of a
    tuning contains only the differences from the defaults.
    """
    default = vars(config.Tuning())
    changes = ", ".join(f"{name}={value!r}" for name, value in vars(tuning).items() if value != default[name])
    mine = f"torchmpi_py {torchmpi_py.__version__}", f"Tuning({changes})", kept_boards.versions(), socket.gethostname()
    packages, tunings, versions, hosts = zip(*world.allgather(mine), strict=True)
    for values, remedy in ((packages, "install the same version"), (tunings, "use the same Tuning and TORCHMPI_*")):
        if (rank := agree.first_different(values)) is not None:
            pair = f"rank 0 has {values[0]} on {hosts[0]}, and rank {rank} has {values[rank]} on {hosts[rank]}"
            raise RanksDisagree(f"start: {pair}; {remedy} on all hosts")
    if (rank := agree.first_different(versions)) is not None and world.rank == 0:
        text = "rank 0 has %s on %s, and rank %d has %s on %s; install the same versions on all hosts"
        logger.warning(text, versions[0], hosts[0], rank, versions[rank], hosts[rank])


def _use_tuning(tuning: config.Tuning, *, inline: bool, logs: bool) -> None:
    """Make ``tuning`` current, as far as this MPI supports it; ``logs`` is True on the rank that logs warnings."""
    if inline and logs:
        logger.warning("this MPI does not provide MPI_THREAD_MULTIPLE, so asynchronous operations block at launch")
    config.use(tuning)
    if inline and config.can_raise:
        config.use(dataclasses.replace(tuning, at_deadline="abort"))
        if logs:
            logger.warning('this MPI does not provide MPI_THREAD_MULTIPLE, so at_deadline="raise" acts like "abort"')


def _complete_variables(whole: Communicator) -> None:
    """Set the variables of torchrun that launchers omit on several nodes: rank 0's address and this node's index.

    All ranks must make this call.
    """
    if whole.num_nodes > 1:
        address = whole.direct.mpi.bcast(rendezvous.own_address(whole.num_nodes) if whole.rank == 0 else "")
        nodes = whole.direct.places.nodes.tolist()
        variables.complete(address, sorted(set(nodes)).index(nodes[whole.rank]))


def _push_levels(custom: Callable[[], int] | None, collective: Callable[[], int | None] | None) -> None:
    """Push the user's levels, then the levels for hierarchical collectives, and set the span between these levels.

    All ranks must make this call.
    """
    stack = communicators.stack()
    entry = 0 if custom is None else custom()
    communicators.set_communicator(_checked_level("custom_communicator_init", entry))
    if collective is None:
        group, node = gpus.group(stack.place), stack.place.node
        end = stack.push(f"node of rank {node}" if group == node else f"IPC group of rank {group}")
    else:
        level = collective()
        end = entry if level is None else _checked_level("collective_communicator", level)
        communicators.set_communicator(entry)
    communicators.set_collective_span(entry, end)


def _checked_level(what: str, level: object) -> int:
    if isinstance(level, bool) or not isinstance(level, int):
        raise TypeError(f"{what} returned {level!r}; return the index of a level, as mpi.push_communicator() does")
    communicators.stack().level(level)
    return level
