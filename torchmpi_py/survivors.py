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
from typing import Any

from torchmpi_py import communication_thread, communicators, exits, recovery, startup, tracing, watchdog
from torchmpi_py.collectives import objects

logger = logging.getLogger("torchmpi_py")

_LOST = "a rank died, and the others have begun anew"


class Attempt:
    """What became of a block: ``deaths`` are the ranks that died in it, as they were numbered before."""

    def __init__(self) -> None:
        self.deaths: tuple[int, ...] = ()


@contextlib.contextmanager
def elastic() -> Iterator[Attempt]:
    """``with mpi.elastic() as attempt:`` a rank that dies in the block does not end the job.

    Where one dies, the others leave the block at once, or at their next call that has to do with other ranks, and the
    world is built anew without it: rank and size are others, and what belonged to the former world (communicators from
    ``split``, parameter servers) is free; symmetric tensors remain, as ordinary ones; ``attempt.deaths`` names the
    dead. The levels are those that ``start`` makes. The program then goes on behind the block, and makes the ranks
    equal again (``catch_up``). A block costs an agreement of all ranks at its end (tens of microseconds): all of them
    enter and leave it alike. Other errors pass.

    In a job that was not started with ``torchmpirun --elastic`` on Open MPI, it does nothing: a death ends the job.

    Source: Bland et al., see ``recovery.py``; Horovod's elastic training has the same form around a function.
    """
    attempt = Attempt()
    if not recovery.is_elastic():
        logger.debug("mpi.elastic(): this job was not started with torchmpirun --elastic, and a death ends it")
        yield attempt
        return
    is_well = True
    try:
        yield attempt
    except Exception as error:
        if not recovery.is_death(error):
            raise
        logger.info("a death ended this rank's attempt: %s", error)
        is_well = False
        recovery.revoke_all()
    if not recovery.agree(communicators.stack().levels[0].direct.mpi, is_well):
        attempt.deaths = recover()


def recover() -> tuple[int, ...]:
    """Build the world anew without the ranks that died; return those. Collective over the survivors."""
    world = former = communicators.stack().levels[0].direct.mpi
    assert startup.wishes is not None, "a started process knows what it was started with"
    wishes = startup.wishes._replace(device=startup.device, has_settled=True)
    while True:
        startup.abandon(_LOST)
        world = world.Shrink()
        try:
            startup.build(world, wishes)
            is_well = True
        except Exception as error:
            if not recovery.is_death(error):
                raise
            is_well = False
            recovery.revoke_all()
            recovery.revoke(world)
        if recovery.agree(world, is_well):
            break
    deaths = recovery.missing(former, world)
    recovery.bury(world)
    if world.rank == 0:
        logger.warning("rank %s died; %d go on", ", ".join(map(str, deaths)), world.size)
    return deaths


def catch_up(step: Any, *parts: Any) -> Any:
    """The state of the rank that has come farthest becomes everyone's; return its ``step``. Collective.

    After a death ranks may be one step apart: some had completed the step, others not. ``step``: a number, or a tuple
    of numbers. ``parts``: what has ``state_dict`` and ``load_state_dict``, such as module and optimizer. Of two ranks
    with the same step the state is taken to be equal. If another rank dies meanwhile, the others begin again.
    """
    while True:
        with elastic() as attempt:
            caught_up = _catch_up(step, parts)
        if not attempt.deaths:
            return caught_up


def _catch_up(step: Any, parts: Sequence[Any]) -> Any:
    steps = objects.allgather_object(step)
    farthest = max(steps)
    if all(other == farthest for other in steps):
        return step
    root = steps.index(farthest)
    is_root = communicators.resolve(None).rank == root
    states = objects.broadcast_object([part.state_dict() for part in parts] if is_root else None, root)
    if step != farthest:
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    return farthest


def meet_to_stop() -> None:
    """Wait for all ranks that live, and take everything down. Collective."""
    while True:
        with elastic() as attempt:
            watchdog.leaving()
            communication_thread.current().drain()
            exits.meet(communicators.stack().levels[0])
            tracing.stop()
        if not attempt.deaths:
            break
    why_not = "mpi.stop() was called; call mpi.start() again"
    try:
        startup.tear_down(why_not)
    except Exception as error:
        if not recovery.is_death(error):
            raise
        startup.abandon(why_not)
