"""Recovery from the death of a rank: the survivors close the session, shrink the world, and build the session again.

A death is not repaired. Every rank gives up communicators, staging memory and the places of tensors in symmetric
memory, and builds the parts of ``start`` again on a communicator of the survivors. An operation that was under way when
a rank died has failed on some ranks, so its results are invalid. An operation that completed on one rank is valid,
because every rank had contributed.

All ranks leave a block together, even a rank that noticed no death before the end of the block. There they agree on
whether all are well (``ulfm.agree``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torchmpi_py.collectives import verbs
from torchmpi_py.core import communication_thread, communicators, config, journal, ulfm
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CommunicatorError, RankDied
from torchmpi_py.runtime import building, exits, session as sessions
from torchmpi_py.watch import kept_boards, tracing, watchdog

logger = logging.getLogger("torchmpi_py")

_LOST = "a rank died, so the session was closed to be built again without that rank"
_MOST_VAIN_RECOVERIES = 3  # Consecutive recoveries although no rank died; seen with Open MPI between nodes.


class _Denied(RankDied):
    """An agreement of the ranks that a rank died or failed; they recover without another agreement."""


class Attempt:
    """The outcome of a block of ``mpi.elastic()``.

    Attributes:
        has_recovered (bool): whether a death ended the block, and the ranks have recovered.
        deaths (tuple of int): the ranks that died in the block, by their former numbers.
    """

    def __init__(self) -> None:
        self.has_recovered = False
        self.deaths: tuple[int, ...] = ()

    def confirm(self) -> None:
        """Raise RankDied on all ranks if one has died, before results of other ranks are used for good.

        Every rank must make this call. When a rank dies, an operation can end on another rank with incomplete results
        (seen with Open MPI between nodes). Call this between the reduction of gradients and ``optimizer.step()``.
        """
        confirm()


def confirm() -> None:
    """Confirm as ``Attempt.confirm`` does; do nothing in a job that is not elastic."""
    if ulfm.is_elastic() and not _agree(True):
        raise _Denied("a rank died; wrap the calls in `with mpi.elastic():` to go on with the other ranks")


def _agree(is_well: bool) -> bool:
    """Return whether all ranks of the world are alive and well. Collective."""
    world = communicators.stack().levels[0]
    return journal.run_alone("mpi.elastic", world, lambda: ulfm.agree(world.direct.mpi, is_well))


class _Blocks:
    """The elastic blocks of this process; they may begin before ``start`` and outlive a session."""

    depth = 0
    num_vain_recoveries = 0  # consecutive recoveries although no rank died


_blocks = _Blocks()


@contextlib.contextmanager
def elastic() -> Iterator[Attempt]:
    """Let the job continue if a rank dies in a ``with`` block.

    Every rank of the world must enter the block, confirm, and leave it. If a rank dies, the others leave the block, at
    once or at their next call that needs another rank. Then the world is built again without the dead ranks: rank and
    size change, and communicators from ``mpi.split`` and parameter servers are gone. Symmetric tensors remain as
    ordinary ones. The program continues after the block, where ``mpi.catch_up`` gives all ranks the same state. Other
    errors pass through the block. If blocks are nested, only the outermost recovers.

    A block costs an agreement of all ranks at its end, and one for each ``attempt.confirm()``. In a job that was not
    started with ``torchmpirun --elastic`` (or ``mpirun --with-ft ulfm``) a block does nothing, and a death ends the
    job.

    Source: Bland et al., see ``core/ulfm.py``; Horovod's elastic training has the same form around a function.

    Returns:
        A context manager that gives an attempt: after the block ``attempt.has_recovered`` is True if a rank died, and
        ``attempt.deaths`` has the former ranks of the dead. ``attempt.confirm()`` raises RankDied on all ranks if one
            has
        died; call it between the reduction of gradients and ``optimizer.step()``.

    Raises:
        NotStarted: ``mpi.start()`` was not called when the block ended.
        CommunicatorError: MPI failed several times in succession although no rank has died.

    Examples:
        >>> with mpi.elastic() as attempt:
        ...     total = mpi.allreduce(1.0)
        >>> attempt.has_recovered, attempt.deaths
        (False, ())
    """
    attempt = Attempt()
    if not ulfm.is_elastic() or _blocks.depth > 0:
        yield attempt
        return
    is_agreed = False  # whether the ranks have agreed that not all of them are well
    failure: Exception | None = None
    _blocks.depth += 1
    try:
        yield attempt
    except Exception as error:
        if not ulfm.is_death(error):
            raise
        logger.info("a death ended this rank's attempt: %s", error)
        is_agreed, failure = isinstance(error, _Denied), error
        ulfm.revoke_all()  # This makes the other ranks leave the block too.
    finally:
        _blocks.depth -= 1
    # All ranks reach this line, by the end of the block or by an error, and agree on whether to recover.
    if is_agreed or not _agree(failure is None):
        attempt.deaths = recover()
        attempt.has_recovered = True
        _blocks.num_vain_recoveries = 0 if attempt.deaths else _blocks.num_vain_recoveries + 1
        if _blocks.num_vain_recoveries > _MOST_VAIN_RECOVERIES:
            raise CommunicatorError("MPI fails repeatedly although no rank has died; restart the job") from failure


def recover() -> tuple[int, ...]:
    """Build the session again without the ranks that died; return their ranks. Collective over the survivors."""
    world = former = communicators.stack().levels[0].direct.mpi
    session, is_built = sessions.current(), False
    while not is_built:
        with building.watched("the recovery from a death", config.current):
            session.close(_LOST, is_lost=True)
            world = world.Shrink()
            is_built = _build(session, world)
    sessions.remaining_world = world
    names = ulfm.names_of_dead(former, world)
    if world.rank == 0 and names:
        logger.warning("rank %s died (numbered as at the launch); %d ranks go on", names, world.size)
    return ulfm.missing(former, world)


def _build(session: sessions.Session, world: MPI.Comm) -> bool:
    """Build the session on the remaining world; return whether it is built on all ranks. Collective over them.

    If another rank dies during the build, all ranks fail or agree to start again with a smaller world.
    """
    try:
        session.build(world)
        is_well = True
    except Exception as error:
        if not ulfm.is_death(error):
            raise
        is_well = False
        ulfm.revoke_all()
        ulfm.revoke(world)
    return ulfm.agree(world, is_well)


def catch_up(step: Any, *parts: Any) -> Any:
    """Give all ranks the state of the rank that is most steps ahead.

    Every rank must make this call, with the same parts in the same order. After a death some ranks may have completed a
    step that others have not. Ranks with the same step are assumed to have the same state. States travel by pickle. If
    another rank dies meanwhile, the others start again.

    Args:
        step (int or tuple of int): step of this rank; the largest one wins.
        parts (Any): objects with ``state_dict`` and ``load_state_dict``, such as a module and its optimizer.

    Returns:
        The largest step.

    Raises:
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> network = torch.nn.Linear(2, 1)
        >>> mpi.catch_up(mpi.rank(), network) == mpi.size() - 1
        True
    """
    while True:
        with elastic() as attempt:
            farthest, states = _state_of_farthest(step, parts)
            if step != farthest:
                for part, state in zip(parts, states, strict=True):
                    part.load_state_dict(state)
                step = farthest  # This rank now has that step too, even if the rank with the state dies.
        if not attempt.has_recovered:
            return farthest


def _state_of_farthest(step: Any, parts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return (step, states of the parts) of the rank with the largest step; no states if all are equal. Collective.

    Raise RankDied on all ranks if one has died.
    """
    steps = verbs.allgather_object(step)
    confirm()
    farthest = max(steps)
    if all(other == farthest for other in steps):
        return farthest, []
    root = steps.index(farthest)
    is_root = communicators.resolve(None).rank == root
    states = verbs.broadcast_object([part.state_dict() for part in parts] if is_root else None, root)
    confirm()
    return farthest, states


def close_session() -> None:
    """Wait for all living ranks, and close the session. Collective."""
    # 1. All ranks reach their ends together. If one dies on the way, the others try again without it.
    while True:
        with elastic() as attempt:
            watchdog.announce_stop(is_drained=False)
            communication_thread.current().drain()
            exits.wait_for_all(communicators.stack().levels[0])
            tracing.stop()
            kept_boards.describe(communicators.stack().levels[0], sessions.current().described_ns)
        if not attempt.has_recovered:
            break
    # 2. Each rank takes its session down with the others, or alone if a rank dies now.
    why_not = "mpi.stop() was called; call mpi.start() again"
    session = sessions.current()
    exits.show_stage("mpi.stop()")
    try:
        session.close(why_not)
    except Exception as error:
        if not ulfm.is_death(error):
            raise
        session.close(why_not, is_lost=True)
    finally:
        exits.show_stage("")
