"""ULFM (user-level failure mitigation): MPI functions that let the surviving ranks continue after a rank has died.

Open MPI 5 has ULFM (``torchmpirun --elastic``, ``mpirun --with-ft ulfm``). Calls that need a dead rank raise an error.
*Revoking* a communicator makes all calls on it raise, on all ranks, so that no rank waits for a rank that has given up.
*Agreeing* and *shrinking* still work on a revoked communicator. The survivors agree on the next step, and shrinking
returns a communicator without the dead ranks.

Source: Bland, Bouteiller, Herault, Bosilca, Dongarra: Post-failure recovery of MPI communication capability (2013).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RankDied

_KNOWN_WITHIN_SECONDS = 1.0
_KNOWN_WITHIN_SECONDS_OF_MPI = 10.0  # time within which a death must be known after an error from MPI

num_acknowledged = 0
"""The number of dead ranks that the current session already excludes. An error means a new death only if more ranks
have died. Only a session assigns this number."""

_owners: weakref.WeakSet[CommunicatorOwner] = weakref.WeakSet()


class CommunicatorOwner(Protocol):
    """An object that owns MPI communicators."""

    def comms(self) -> list[MPI.Comm]:
        """Return the MPI communicators that the object owns."""


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the MPI of this job reports a death to the survivors instead of ending the job."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled", "t", "y")


def is_death(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, means that a rank has died or that another rank has noticed a death.

    When a rank dies, Open MPI's collectives may also fail with any other error, or return wrong values that cause some
    error later. So for other errors, MPI's list of failed ranks decides.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not is_elastic():
        return False
    classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    within_seconds = _KNOWN_WITHIN_SECONDS
    while error is not None:
        if isinstance(error, RankDied) or (isinstance(error, mpi.Exception) and error.Get_error_class() in classes):
            return True
        if isinstance(error, mpi.Exception):
            within_seconds = _KNOWN_WITHIN_SECONDS_OF_MPI
        error = error.__cause__ or error.__context__
    return _is_known(mpi.COMM_WORLD, within_seconds)


def _is_known(world: MPI.Comm, within_seconds: float) -> bool:
    """Return whether a new death becomes known, or a communicator is revoked, ``within_seconds``."""
    until = time.monotonic() + within_seconds
    while _num_dead(world) <= num_acknowledged and not any(comm and comm.Is_revoked() for comm in _comms()):
        if time.monotonic() > until:
            return False
        _let_mpi_work(world)
        time.sleep(0.01)
    return True


def _let_mpi_work(world: MPI.Comm) -> None:
    """Let Open MPI process messages, because only then can it detect a death. The probe may fail after a death."""
    with contextlib.suppress(Exception):
        world.Iprobe()


def _num_dead(world: MPI.Comm) -> int:
    failed = world.Get_failed()
    try:
        return failed.size
    finally:
        failed.Free()


def has_lost_ranks() -> bool:
    """Return whether ranks of this job are known to have died."""
    return is_elastic() and _num_dead(sys.modules["mpi4py.MPI"].COMM_WORLD) > 0


def agree(comm: MPI.Comm, is_well: bool) -> bool:
    """Return whether all ranks of a communicator are alive and pass ``is_well=True``.

    All surviving ranks must make this call, and get the same result.
    """
    try:
        return bool(comm.Agree(int(is_well)))
    except Exception as error:
        if not is_death(error):
            raise
        return False


def revoke(comm: MPI.Comm) -> None:
    """Make every call on a communicator raise, on all of its ranks. One rank alone may make this call."""
    if comm and not comm.Is_revoked():
        comm.Revoke()


def register(owner: CommunicatorOwner) -> None:
    """Let ``revoke_all`` also revoke the communicators of ``owner``, as long as ``owner`` exists."""
    _owners.add(owner)


def revoke_all() -> None:
    """Revoke all communicators after a death, so that every pending call raises, on this rank and on other ranks.

    One rank alone may make this call.
    """
    for comm in _comms():
        revoke(comm)


def forget_all() -> None:
    """Forget all registered owners, because their world was given up; the program may still refer to them."""
    _owners.clear()


def _comms() -> list[MPI.Comm]:
    return [comm for owner in list(_owners) for comm in owner.comms()]


def missing(before: MPI.Comm, after: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks of ``before`` that are not in ``after``."""
    old, new = before.Get_group(), after.Get_group()
    ranks = _free_after_translation(old.Difference(old, new), old)
    for group in (old, new):
        group.Free()
    return ranks


def _free_after_translation(group: MPI.Group, everyone: MPI.Group) -> tuple[int, ...]:
    """Return the ranks of a group in the numbering of ``everyone``, and free the group."""
    ranks = tuple(group.Translate_ranks(list(range(group.size)), everyone))
    group.Free()
    return ranks


def names_of_dead(before: MPI.Comm, after: MPI.Comm) -> str:
    """Return, as text, the ranks that are in ``before`` but not in ``after``, numbered as at the launch."""
    everyone = sys.modules["mpi4py.MPI"].COMM_WORLD
    known = set(missing(everyone, before))
    return ", ".join(str(rank) for rank in missing(everyone, after) if rank not in known)


def died(what: str, comm: MPI.Comm, cause: Exception) -> RankDied:
    """Return the error to raise for an operation that failed because a rank died."""
    everyone = comm.Get_group()
    ranks = _free_after_translation(comm.Get_failed(), everyone)
    everyone.Free()
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank"
    error = RankDied(f"{what}: {who} died; to continue with the other ranks, put the calls into `with mpi.elastic():`")
    error.__cause__ = cause
    return error
