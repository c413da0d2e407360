"""Going on when a rank dies: the survivors let go of everything, shrink the world, and build it anew.

What a death leaves behind is not repaired: communicators, staging memory, the tensors' places in symmetric memory are
all given up, on every rank, and what ``start`` builds is built again on a communicator of the survivors. Whatever was
half done when a rank died has failed on some ranks, and its results are of no use; whatever was complete on one rank
counts, for it can only be so when all ranks had brought their part.

All ranks have to leave a block together, also those that had noticed nothing when they came to its end: there they
agree on whether all were well (``recovery.agree``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torchmpi_py.collectives import verbs
from torchmpi_py.core import communication_thread, communicators, journal, ulfm
from torchmpi_py.errors import CommunicatorError, RankDied
from torchmpi_py.runtime import exits
from torchmpi_py.runtime import session as sessions
from torchmpi_py.watch import tracing, watchdog

logger = logging.getLogger("torchmpi_py")

_LOST = "a rank died, and the others have begun anew"


class _Denied(RankDied):
    """The ranks have agreed that not all are well: there is nothing more to agree on before they recover."""


class Attempt:
    """What becomes of a block: whether it was ended and the world built anew (``has_recovered``).

    ``deaths`` are the ranks that died in it, as they were numbered before.
    """

    def __init__(self) -> None:
        self.has_recovered = False
        self.deaths: tuple[int, ...] = ()

    def confirm(self) -> None:
        """Before results of other ranks are used for good: RankDied, on all ranks, if one has died. Collective.

        For when a rank dies an operation can be complete on another one with results that are not (seen with Open MPI
        between nodes). Call it between the reduction of gradients and ``optimizer.step()``.
        """
        confirm()


def confirm() -> None:
    """See ``Attempt.confirm``. In a job that is not elastic it does nothing."""
    if ulfm.is_elastic() and not _agree(True):
        raise _Denied("a rank died; with mpi.elastic() the others can go on")


def _agree(is_well: bool) -> bool:
    """Whether all ranks of the world live, and all is well on each. Collective."""
    world = communicators.stack().levels[0]
    return journal.run_alone("mpi.elastic", world, lambda: ulfm.agree(world.direct.mpi, is_well))


_MOST_IN_VAIN = 3  # recoveries, one after another, without a death: Open MPI has agreed so, between nodes


@contextlib.contextmanager
def elastic() -> Iterator[Attempt]:
    """``with mpi.elastic() as attempt:`` a rank that dies in the block does not end the job.

    Where one dies, the others leave the block at once, or at their next call that has to do with other ranks, and the
    world is built anew without it: rank and size are others, and what belonged to the former world (communicators from
    ``split``, parameter servers) is free; symmetric tensors remain, as ordinary ones; ``attempt.has_recovered`` is
    True, and ``attempt.deaths`` names the dead. The levels are those that ``start`` makes. The program then goes on
    behind the block, and makes the ranks equal again (``catch_up``). A block costs an agreement of all ranks at its
    end, and one at each ``attempt.confirm()``: all ranks of the world enter it, confirm, and leave it alike. Of blocks
    in blocks the outermost does all that. Other errors pass.

    In a job that was not started with ``torchmpirun --elastic`` on Open MPI, it does nothing: a death ends the job.

    Source: Bland et al., see ``recovery.py``; Horovod's elastic training has the same form around a function.
    """
    attempt = Attempt()
    if not ulfm.is_elastic() or sessions.current().elastic_depth > 0:
        yield attempt
        return
    session = sessions.current()
    is_agreed = False
    failure: Exception | None = None
    session.elastic_depth += 1
    try:
        yield attempt
    except Exception as error:
        if not ulfm.is_death(error):
            raise
        logger.info("a death ended this rank's attempt: %s", error)
        is_agreed, failure = isinstance(error, _Denied), error
        ulfm.revoke_all()
    finally:
        session.elastic_depth -= 1
    if is_agreed or not _agree(failure is None):
        attempt.deaths = recover()
        attempt.has_recovered = True
        session.num_in_vain = 0 if attempt.deaths else session.num_in_vain + 1
        if session.num_in_vain > _MOST_IN_VAIN:
            raise CommunicatorError("MPI fails again and again, though no rank has died") from failure


def recover() -> tuple[int, ...]:
    """Build the world anew without the ranks that died; return those. Collective over the survivors."""
    world = former = communicators.stack().levels[0].direct.mpi
    session = sessions.current()
    while True:
        session.close(_LOST, is_lost=True)
        world = world.Shrink()
        ulfm.acknowledge_failures(world)  # from now on an error is a death only if another rank has died
        try:
            session.build(world)
            is_well = True
        except Exception as error:
            if not ulfm.is_death(error):
                raise
            is_well = False
            ulfm.revoke_all()
            ulfm.revoke(world)
        if ulfm.agree(world, is_well):
            break
    sessions.remaining_world = world
    names = ulfm.names_of_dead(former, world)
    if world.rank == 0 and names:
        logger.warning("rank %s died (as numbered at the launch); %d go on", names, world.size)
    return ulfm.missing(former, world)


def catch_up(step: Any, *parts: Any) -> Any:
    """The state of the rank that has come farthest becomes everyone's; return its ``step``. Collective.

    After a death ranks may be one step apart: some had completed the step, others not. ``step``: a number, or a tuple
    of numbers. ``parts``: what has ``state_dict`` and ``load_state_dict``, such as module and optimizer. Of two ranks
    with the same step the state is taken to be equal. If another rank dies meanwhile, the others begin again.
    """
    while True:
        with elastic() as attempt:
            farthest = _state_of_farthest(step, parts)
            if step != farthest.step:
                for part, state in zip(parts, farthest.states, strict=True):
                    part.load_state_dict(state)
        if not attempt.has_recovered:
            return farthest.step


class _State(NamedTuple):
    """The state of the rank that has come farthest; without the states of the parts if all ranks are there."""

    step: Any
    states: list[Any]


def _state_of_farthest(step: Any, parts: Sequence[Any]) -> _State:
    """On all ranks, or on none: nobody has it before all are known to."""
    steps = verbs.allgather_object(step)
    confirm()
    farthest = max(steps)
    if all(other == farthest for other in steps):
        return _State(farthest, [])
    root = steps.index(farthest)
    is_root = communicators.resolve(None).rank == root
    states = verbs.broadcast_object([part.state_dict() for part in parts] if is_root else None, root)
    confirm()
    return _State(farthest, states)


def meet_to_stop() -> None:
    """Wait for all ranks that live, and take everything down. Collective."""
    while True:
        with elastic() as attempt:
            watchdog.announce_stop()
            communication_thread.current().drain()
            exits.wait_for_all(communicators.stack().levels[0])
            tracing.stop()
        if not attempt.has_recovered:
            break
    why_not = "mpi.stop() was called; call mpi.start() again"
    session = sessions.current()
    try:
        session.close(why_not)
    except Exception as error:
        if not ulfm.is_death(error):
            raise
        session.close(why_not, is_lost=True)
