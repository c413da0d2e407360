"""Recovery from the death of a rank: the survivors close the session, shrink the world, and build the session again.

A death is not repaired. Every rank gives up its communicators, its staging memory and its symmetric memory, and builds
the parts of ``start`` again on a communicator of the survivors. An operation that was under way when a rank died has
failed on some ranks, so its results are invalid. An operation that completed on one rank is normally valid, because
every rank had contributed (``Attempt.confirm`` covers the exception).

All ranks leave a block of ``mpi.elastic()`` together, even a rank that noticed no death before the end of the block. At
the end, the ranks agree on whether all ranks are well (``ulfm.agree``).
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

_LOST = "a rank died, and the session is being built again without it; repeat the call after the mpi.elastic() block"
# Limit of consecutive recoveries without a death. Open MPI can cause such recoveries between nodes.
_MOST_VAIN_RECOVERIES = 3


class _Denied(RankDied):
    """The error on every rank after the ranks agreed that a rank died or failed; they need not agree again."""


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
        """Raise RankDied on all ranks if a rank has died, so that no rank continues with incomplete results.

        Every rank must make this call. When a rank dies, an operation can end on another rank with incomplete results
        (seen with Open MPI between nodes). Make this call between the reduction of gradients and ``optimizer.step()``.
        """
        confirm()


def confirm() -> None:
    """Confirm as ``Attempt.confirm`` does; do nothing in a job that is not elastic."""
    if ulfm.is_elastic() and not _agree(True):
        raise _Denied("a rank died; if this call is in a block of mpi.elastic(), the other ranks continue after it")


def _agree(is_well: bool) -> bool:
    """Return whether all ranks of the world are alive and well. All ranks must make this call."""
    world = communicators.stack().levels[0]
    return journal.run_alone("mpi.elastic", world, lambda: ulfm.agree(world.direct.mpi, is_well))


class _Blocks:
    """The state of this process's elastic blocks, which may begin before ``start`` and end after a session."""

    depth = 0
    num_vain_recoveries = 0  # number of consecutive recoveries without a death


_blocks = _Blocks()


@contextlib.contextmanager
def elastic() -> Iterator[Attempt]:
    """Let the job continue if a rank dies in a ``with`` block.

    Every rank of the world must enter the block, make the same calls of ``attempt.confirm()``, and leave the block. If
    a rank dies, the other ranks leave the block immediately, or at their next call that needs another rank. Then the
    world is built again without the dead ranks: rank and size change, and communicators from ``mpi.split`` and
    parameter servers can no longer be used. Symmetric tensors become ordinary tensors. The program continues after the
    block, where ``mpi.catch_up`` gives all ranks the same state. Other errors pass through the block. If blocks are
    nested, only the outermost block recovers.

    At the end of a block, and in each ``attempt.confirm()``, all ranks wait for each other to agree. In a job that was
    not started with ``torchmpirun --elastic`` (or ``mpirun --with-ft ulfm``) a block does nothing, and a death ends the
    job.

    The method is from Bland et al. (see ``core/ulfm.py``). Horovod's elastic training wraps a function in a similar
    way.

    Returns:
        A context manager that yields an attempt. After the block, ``attempt.has_recovered`` is True if a rank died, and
        ``attempt.deaths`` contains the former ranks of the dead processes. ``attempt.confirm()`` raises RankDied on all
        ranks if a rank has died; call it between the reduction of gradients and ``optimizer.step()``.

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
        logger.info("the death of a rank ended this rank's block of mpi.elastic(): %s", error)
        is_agreed, failure = isinstance(error, _Denied), error
        ulfm.revoke_all()  # This makes the other ranks leave the block too.
    finally:
        _blocks.depth -= 1
    # All ranks reach this line, at the end of the block or after an error, and agree on whether to recover.
    if is_agreed or not _agree(failure is None):
        attempt.deaths = recover()
        attempt.has_recovered = True
        _blocks.num_vain_recoveries = 0 if attempt.deaths else _blocks.num_vain_recoveries + 1
        if _blocks.num_vain_recoveries > _MOST_VAIN_RECOVERIES:
            raise CommunicatorError("elastic: MPI failed repeatedly, but no rank died; restart the job") from failure


def recover() -> tuple[int, ...]:
    """Build the session again without the processes that died, and return their former ranks.

    All survivors must make this call.
    """
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
        logger.warning("dead ranks: %s (numbered as at the launch); number of remaining ranks: %d", names, world.size)
    return ulfm.missing(former, world)


def _build(session: sessions.Session, world: MPI.Comm) -> bool:
    """Build the session on the remaining world; return whether it is built on all ranks.

    All ranks of ``world`` must make this call. If another rank dies during the call, the survivors agree on the result
    False, and the caller starts again with a smaller world.
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
    """Give all ranks the state of the rank with the largest step.

    Every rank must make this call, with the same parts in the same order. After a death, some ranks may have completed
    a step that other ranks have not. Ranks with the same step are assumed to have the same state. States are sent by
    pickle. If another rank dies during the call, the surviving ranks repeat the exchange.

    Args:
        step (int or tuple of int): step that this rank has reached.
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
                step = farthest  # This rank now has the newest state, even if the rank that sent it dies.
        if not attempt.has_recovered:
            return farthest


def _state_of_farthest(step: Any, parts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return (step, states of the parts) of the rank with the largest step; no states if all steps are equal.

    All ranks must make this call. Raise RankDied on all ranks if a rank has died.
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
    """Wait for all living ranks, and close the session. All ranks must make this call."""
    # 1. Wait until all ranks have drained their operations. If a rank dies first, the other ranks try again without it.
    while True:
        with elastic() as attempt:
            watchdog.announce_stop(is_drained=False)
            communication_thread.current().drain()
            exits.wait_for_all(communicators.stack().levels[0])
            tracing.stop()
            kept_boards.describe(communicators.stack().levels[0], sessions.current().described_ns)
        if not attempt.has_recovered:
            break
    # 2. Close the session together with the other ranks, or alone if a rank dies now.
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
