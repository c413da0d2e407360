"""Communicators: groups of ranks, and the stack of levels, one of which is the current level.

A *level* divides the ranks of its parent level into groups by a key; level 0 is the whole world. On each rank, a
Communicator represents the level, and contains this rank's group. Its ``inner`` is the Communicator itself. Its
``outer`` links this rank with its counterparts in the other groups of the same parent.

For example, 5 ranks with the keys A A B B B are in the inner groups {0 1} and {2 3 4}. A level has one of two forms:

- Cartesian (groups of equal size, if requested): one outer communicator per inner rank, across all groups.
- Tree (otherwise): one outer communicator of the groups' first ranks, {0 2} in the example. The outer communicator of
  every other rank contains only that rank.

``push`` adds a level below the current level, but does not make it current; ``set_communicator`` and ``at`` do that.
The *span* is the pair of levels that hierarchical collectives combine.

The behaviour follows TorchMPI's communicators (its resources.cpp). In addition, the groups have the same order in every
outer communicator, a level may have any number of siblings, and keys may have any length.

Every Communicator owns two channels (``channels.py``): ``direct`` for calls made by the user's thread, and
``background`` for the communication thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Hashable, Iterator, Sequence as Ranks
from typing import Any

import numpy as np

from torchmpi_py.core import agree, communication_thread, journal, sequences
from torchmpi_py.core.channels import BACKGROUND, DIRECT, Channel, Place, Places
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.sequences import CallSequence
from torchmpi_py.errors import CommunicatorError, NotStarted


class Communicator:
    """A group of ranks, to pass as ``comm=``.

    ``mpi.split`` and ``mpi.push_communicator`` create communicators, and ``mpi.communicator`` returns the communicator
    of a level. ``mpi.stop()`` frees all communicators. To free a communicator from ``mpi.split`` earlier, call ``free``
    or use the communicator in a ``with`` block.

    Attributes:
        rank (int): rank of this process in the group, 0 to ``size - 1``.
        size (int): number of ranks in the group.
        num_nodes (int): number of nodes on which the group has ranks.
        key (str): name of the group, shown in messages.
        inner (Communicator): this rank's group, which is the communicator itself.
        outer (Communicator): this rank and its counterparts in the level's other groups; None for a communicator from
            ``mpi.split``.
        is_cartesian (bool): whether all groups of the level have the same size, and every rank has counterparts.

    Examples:
        >>> with mpi.split(mpi.rank() % 2) as half:
        ...     mpi.allreduce(1, comm=half) == half.size
        True
    """

    def __init__(self, group: MPI.Comm, place: Place, key: str) -> None:
        mine = np.array([*place, *sequences.offer()])
        # Exchange an array of numbers, because the exchange of thousands of Python objects would take a second.
        table = np.empty((group.size, mine.size), mine.dtype)
        group.Allgather(mine, table)
        places, offers = Places(table[:, : len(place)]), table[:, len(place) :]
        self.direct = Channel(group, places, DIRECT)
        self.background = Channel(group.Dup(), places, BACKGROUND)
        self.sequences = [
            CallSequence(group.rank, places, offers, thread_role, key) for thread_role in (DIRECT, BACKGROUND)
        ]
        self.rank: int = group.rank
        self.size: int = group.size
        self.key = key
        self.num_nodes = self.direct.num_nodes
        self.inner = self
        self.outer: Communicator | None = None
        self.is_cartesian = False
        self.parent: Communicator | None = None
        self.companions: dict[str, Communicator] = {}  # the communicators that ``beside`` has made, by key
        self.is_free = False
        # Whether MPI may still use the communicator for an operation that was given up; if so, never free it.
        self.is_stuck = False
        self.choices: dict[Any, Any] = {}  # the selector's choices for this communicator
        self.plans: dict[Any, Any] = {}  # the plans of repeated calls (``collectives/kept_plans.py``)

    @property
    def is_broken(self) -> bool:
        """Whether a call failed on this rank that other ranks may have completed; if so, later calls are refused."""
        return any(sequence.is_broken for sequence in self.sequences)

    def free(self) -> None:
        """Wait for the operations under way, and free the communicator's resources.

        Every rank of the communicator must make this call. If an earlier call differed between ranks, ``free`` does not
        wait, and MPI's own resources are not freed.

        Raises:
            CommunicatorError: the communicator is a level, which only ``mpi.stop()`` frees, or a thread is using it.
            NotStarted: this process was forked from a started process.
        """
        if self.outer is not None:
            raise CommunicatorError(f"{self!r} is a level, which only mpi.stop() frees; remove this free() or `with`")
        if not self.is_free:
            stack()  # This raises NotStarted in a forked child.
            if self.is_broken:
                self._release(is_lost=True)
                return
            communication_thread.current().drain({self})
            if self.direct.is_in_use:
                raise CommunicatorError(f"{self!r} cannot be freed during a collective; call free() afterwards")
            journal.run_together("free", self, self._release)

    def _release(self, *, is_lost: bool = False) -> None:
        """Free all resources. All ranks must make this call, unless the communicator ``is_lost`` (a rank has died)."""
        if not self.is_free:
            self.is_free = True
            self.plans.clear()
            # A thread that is in a collective still needs the memory.
            is_lost = is_lost or self.is_broken or self.is_stuck or self.direct.is_in_use
            if self.outer is not None:
                self.outer._release(is_lost=is_lost)
            for channel in (self.background, self.direct):
                channel.free(is_lost=is_lost)
            for sequence in self.sequences:
                sequence.free()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception this rank must not call ``free``, which needs all ranks: the other ranks may not call it.
        if kind is None or self.size == 1:
            self.free()

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Return the communicator itself: a deep copy of an object shares the object's communicators."""
        return self

    def __repr__(self) -> str:
        state = ", freed" if self.is_free else ""
        return f"<Communicator {self.key!r}: rank {self.rank} of {self.size}, {_nodes(self.num_nodes)}{state}>"


class Stack:
    """The levels of a started process, the current level, and the span."""

    def __init__(self, world: MPI.Comm, place: Place, want_cartesian: bool, outer: Stack | None = None) -> None:
        self.outer = outer  # stack of the whole job, if this stack belongs to a group that runs an experiment
        self.place = place
        self.want_cartesian = want_cartesian
        self.levels = [Communicator(world.Dup(), place, "global")]
        self.levels[0].outer = Communicator(world.Split(world.rank), place, "global")
        self.levels[0].is_cartesian = want_cartesian
        self.current = self.levels[0]
        self.span = (0, 0)
        self.others: list[Communicator] = []

    def keep(self, comm: Communicator) -> Communicator:
        """Register ``comm`` to be freed with the stack, unless the program frees it earlier; return ``comm``."""
        self.others = [*(other for other in self.others if not other.is_free), comm]
        return comm

    def push(self, key: str) -> int:
        """Add a level below the current level, and return its index.

        All ranks of the current level must make this call.
        """
        parent = self.current.direct.mpi
        plan = group_by_key(parent.allgather(key), parent.rank, self.want_cartesian)
        level = Communicator(parent.Split(plan.inner_colour, plan.inner_rank), self.place, key)
        level.outer = Communicator(parent.Split(plan.outer_colour, plan.outer_rank), self.place, key)
        level.is_cartesian = plan.is_cartesian
        level.parent = self.current
        self.levels.append(level)
        return len(self.levels) - 1

    def level(self, index: int) -> Communicator:
        """Return the level with this index. Raise ValueError if it does not exist."""
        if not isinstance(index, int) or not 0 <= index < len(self.levels):
            raise ValueError(f"level {index!r} does not exist; pass the index of a level, 0 to {len(self.levels) - 1}")
        return self.levels[index]

    def free(self, *, is_lost: bool = False) -> None:
        """Free all communicators, the newest first. All ranks must make this call, unless a rank died (``is_lost``)."""
        for communicator in [*reversed(self.others), *reversed(self.levels)]:
            communicator._release(is_lost=is_lost)


current_stack: Stack | None = None
"""The level stack of the session. Only a session assigns this variable; in a forked child, ``exits`` does."""

why_not = "call mpi.start() first"
"""The advice in NotStarted while no session is open. Only a session assigns this variable; in a forked child, ``exits``
does."""


def stack() -> Stack:
    """Return the session's stack. Raise NotStarted, with advice, if no session is open."""
    if current_stack is None:
        raise NotStarted(f"torchmpi_py is not started in this process: {why_not}")
    return current_stack


def is_started() -> bool:
    """Return whether this process is between ``mpi.start()`` and ``mpi.stop()``.

    Returns:
        True or False.
    """
    return current_stack is not None


class NoCommunicator:
    """The object that ``split`` returns on a rank that joins no group.

    The object is false in a condition, and passing it as ``comm=`` raises ValueError. ``comm=None`` would not raise,
    because it means the current level.
    """

    def __bool__(self) -> bool:
        return False

    def free(self) -> None:
        """Do nothing, because nothing was allocated."""

    def __enter__(self) -> NoCommunicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing, because nothing was allocated."""

    def __repr__(self) -> str:
        return "<NoCommunicator: this rank passed color=None to mpi.split>"


def resolve(comm: Communicator | None) -> Communicator:
    """Return ``comm``, or the current level for None.

    Raise NotStarted, ValueError, TypeError or CommunicatorError if the communicator cannot be used.
    """
    if comm is None:
        return current_stack.current if current_stack is not None else stack().current
    stack()
    if isinstance(comm, NoCommunicator):
        raise ValueError(f"comm={comm!r}: this rank is in no group; put the call under `if comm:` to skip this rank")
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm={comm!r} is not a torchmpi_py communicator; pass one from mpi.split or mpi.communicator")
    if comm.is_free:
        raise CommunicatorError(f"{comm!r} was freed, or lost when a rank died; create a new one with mpi.split")
    return comm


def push_communicator(key: str | int) -> int:
    """Add a level below the current level, with a group for each ``key``.

    Every rank of the current level must make this call. The current level stays current; to select the new level, call
    ``mpi.set_communicator`` or use ``mpi.at``.

    Args:
        key (str or int): key of this rank; ranks with the same key are in one group.

    Returns:
        The index of the new level, the same on every rank.

    Raises:
        TypeError: ``key`` is neither a str nor an int.
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> level = mpi.push_communicator(mpi.rank() // 2)  # groups of two ranks
        >>> with mpi.at(level):
        ...     mpi.size() <= 2
        True
    """
    if not isinstance(key, (str, int)):
        raise TypeError(f"push_communicator: key must be a str or an int, not {key!r}")
    levels = stack()
    return journal.run_together("push_communicator", levels.current, lambda: levels.push(str(key)))


def set_communicator(level: int) -> None:
    """Make a level current, so that ``mpi.rank()``, ``mpi.size()`` and calls without ``comm=`` refer to it.

    Every rank must make this call, because ranks at different levels cannot exchange messages. The ranks do not wait
    for each other.

    Args:
        level (int): index of the level; 0 is the whole world.

    Returns:
        None.

    Raises:
        ValueError: the level does not exist.
        NotStarted: ``mpi.start()`` was not called.
    """
    stack().current = stack().level(level)


@contextlib.contextmanager
def at(level: int) -> Iterator[Communicator]:
    """Make a level current inside a ``with`` block, and restore the former level at the end of the block.

    Every rank must enter the block.

    Args:
        level (int): index of the level; 0 is the whole world.

    Returns:
        A context manager that yields the level's communicator.

    Raises:
        ValueError: the level does not exist.
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> with mpi.at(0) as world:
        ...     mpi.rank() == world.rank
        True
    """
    levels = stack()
    former = levels.current
    levels.current = levels.level(level)
    try:
        yield levels.current
    finally:
        levels.current = former


def set_collective_span(begin: int, end: int) -> None:
    """Set the two levels that hierarchical collectives combine.

    Every rank must make this call with the same arguments, at the same point of the program. The call waits for the
    operations that this rank has launched.

    Args:
        begin (int): index of the upper level, across which the collectives work.
        end (int): index of a level below ``begin``. The ranks of each group of this level reduce among themselves
            first. Pass ``begin`` again for no span.

    Returns:
        None.

    Raises:
        ValueError: a level does not exist, or ``end`` is not below ``begin``.
        NotStarted: ``mpi.start()`` was not called.
    """
    levels = stack()
    whole, below = levels.level(begin), levels.level(end)
    while below is not whole and below.parent is not None:
        below = below.parent
    if below is not whole:
        raise ValueError(f"set_collective_span: end={end} must be begin={begin}, or a level that was pushed below it")
    communication_thread.current().drain()  # Operations that were launched before still combine the former levels.
    levels.span = (begin, end)
    for level in levels.levels:
        level.choices.clear()
        level.plans.clear()


def communicator(level: int | None = None) -> Communicator:
    """Return the communicator of a level.

    Args:
        level (int): index of the level, 0 for the whole world; default None, the current level.

    Returns:
        The communicator.

    Raises:
        ValueError: the level does not exist.
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> mpi.communicator(0).size == mpi.size()
        True
    """
    return stack().current if level is None else stack().level(level)


def split(color: int | None, key: int = 0) -> Communicator:
    """Create a communicator of the ranks that pass the same ``color``.

    Every rank of the current level must make this call, including ranks that join no group.

    Args:
        color (int): number of this rank's group, 0 or more; None to join no group.
        key (int): position in the group: ranks are ordered by ``key``, then by rank; default 0.

    Returns:
        The communicator, to pass as ``comm=``. With ``color=None``, an object that is false in a condition and raises
        ValueError when it is passed as ``comm=``.

    Raises:
        ValueError: the color or key of a rank is not valid; raised on every rank.
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> with mpi.split(0, key=-mpi.rank()) as backwards:
        ...     backwards.rank == mpi.size() - 1 - mpi.rank()
        True
    """
    levels = stack()

    def make() -> Communicator | NoCommunicator:
        # MPI accepts only numbers of 31 bits. So replace the color by the first rank that passed it, and the key by
        # the position among the sorted keys.
        comm = levels.current.direct.mpi
        pairs = agree.gather_results(
            comm.allgather, lambda: _checked(color, key), (ValueError,), str, agree.first_as(ValueError)
        )
        colors, keys = zip(*pairs, strict=True)
        place = sorted(range(comm.size), key=lambda rank: (keys[rank], rank)).index(comm.rank)
        group: Any = comm.Split(MPI.UNDEFINED if color is None else colors.index(colors[comm.rank]), place)
        return NoCommunicator() if color is None else Communicator(group, levels.place, f"split {color}")

    comm = journal.run_together("split", levels.current, make)
    if isinstance(comm, Communicator):
        levels.keep(comm)
    return comm  # type: ignore[return-value]  # using a NoCommunicator as ``comm=`` is an error


def _checked(color: Any, key: Any) -> tuple[int | None, int]:
    """Return the color and key of a rank as whole numbers. Raise ValueError for a color or key that is not valid."""
    whole, place = _whole_number(color), _whole_number(key)
    if color is not None and (isinstance(color, bool) or whole is None or whole < 0):
        raise ValueError(f"split: a rank passed color={color!r}; color must be a whole number >= 0, or None")
    if place is None:
        raise ValueError(f"split: a rank passed key={key!r}; key must be a whole number")
    return whole, place


def _whole_number(value: Any) -> int | None:
    """Return ``value`` as an int; None if it is not a whole number."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # PyTorch raises RuntimeError for a tensor of several elements.
        return None


def beside(comm: Communicator, key: str) -> Communicator:
    """Return the companion of ``comm`` for ``key``: a communicator of the same ranks with its own order of operations.

    The first call with a key creates the companion, so all ranks of ``comm`` must make that call.
    """
    if key not in comm.companions:
        levels = stack()
        companion = journal.run_together(key, comm, lambda: Communicator(comm.direct.mpi.Dup(), levels.place, key))
        comm.companions[key] = levels.keep(companion)
    return comm.companions[key]


def communicator_names() -> str:
    """Return a description of all levels, one per line, as this rank sees them.

    Returns:
        A text with one line for each level.

    Raises:
        NotStarted: ``mpi.start()`` was not called.
    """
    return "\n".join(_describe(stack(), index, level) for index, level in enumerate(stack().levels))


def _describe(levels: Stack, index: int, level: Communicator) -> str:
    """Return a line about a level: this rank's place, the level's form, and whether it is current or in the span."""
    roles = [name for name, here in (("current", level is levels.current), ("span", index in levels.span)) if here]
    outer = f", outer rank {level.outer.rank} of {level.outer.size}" if level.outer is not None else ""
    return (
        f"level {index} {level.key!r}: rank {level.rank} of {level.size}{outer}, "
        f"{'cartesian' if level.is_cartesian else 'tree'}, {_nodes(level.num_nodes)}"
        f"{f'  <- {chr(44).join(roles)}' if roles else ''}"
    )


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


@dataclasses.dataclass(frozen=True)
class Grouping:
    """The colours and ranks that one rank of the parent passes to two MPI splits, for its inner and outer group."""

    inner_colour: int
    inner_rank: int
    outer_colour: int
    outer_rank: int
    is_cartesian: bool


def group_by_key(keys: Ranks[Hashable], rank: int, want_cartesian: bool) -> Grouping:
    """Return the grouping of ``rank``, from the ``keys`` of all ranks of the parent in rank order.

    The groups are ordered by their lowest rank.
    """
    groups: dict[Hashable, list[int]] = {}
    for member, key in enumerate(keys):
        groups.setdefault(key, []).append(member)
    mine = groups[keys[rank]]
    inner_rank = mine.index(rank)
    is_cartesian = want_cartesian and len({len(group) for group in groups.values()}) == 1
    is_linked = is_cartesian or inner_rank == 0
    return Grouping(
        inner_colour=mine[0],
        inner_rank=inner_rank,
        outer_colour=inner_rank if is_linked else len(keys) + rank,
        outer_rank=list(groups).index(keys[rank]),
        is_cartesian=is_cartesian,
    )
