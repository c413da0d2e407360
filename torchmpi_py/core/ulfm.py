"""What an MPI offers to the survivors when a rank dies: ULFM, user-level failure mitigation.

Open MPI 5 has it (``torchmpirun --elastic``, ``mpirun --with-ft ulfm``). Calls that a dead rank can no longer take part
in raise. *Revoking* a communicator makes all calls on it raise, on all ranks, so that nobody waits for a rank that has
given up; *agreeing* and *shrinking* still work then: the survivors find out together what is to be done, and get a
communicator of their own.

Source: Bland, Bouteiller, Herault, Bosilca, Dongarra: Post-failure recovery of MPI communication capability (2013).
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RankDied

_KNOWN_WITHIN_SECONDS = 1.0
_KNOWN_WITHIN_SECONDS_OF_MPI = 10.0  # after an error of MPI


class _Failures:
    num_acknowledged = 0  # dead ranks that the job goes on without


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the MPI of this job tells the survivors that a rank died, instead of ending the job."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled", "t", "y")


def is_death(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that a rank has died, or that another one has noticed.

    When a rank dies Open MPI's collectives may also fail with any other error, or bring nonsense, which then leads to
    errors of any kind: what is known of the dead decides.
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
    """Whether a rank has died that is not buried, or another one has said so; that may become known a little later."""
    until = time.monotonic() + within_seconds
    while _num_dead(world) <= _Failures.num_acknowledged and not any(comm and comm.Is_revoked() for comm in _comms()):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _num_dead(world: MPI.Comm) -> int:
    failed = world.Get_failed()
    try:
        return failed.size
    finally:
        failed.Free()


def acknowledge_failures(world: MPI.Comm) -> None:
    """The job goes on with ``world``, and without those that have died before."""
    _Failures.num_acknowledged = sys.modules["mpi4py.MPI"].COMM_WORLD.size - world.size


def has_lost_ranks() -> bool:
    """Whether ranks of this job are known to have died."""
    return is_elastic() and _num_dead(sys.modules["mpi4py.MPI"].COMM_WORLD) > 0


def agree(comm: MPI.Comm, is_well: bool) -> bool:
    """Whether all ranks of a communicator live and are well, the same on every one that lives. Collective."""
    try:
        return bool(comm.Agree(int(is_well)))
    except Exception as error:
        if not is_death(error):
            raise
        return False


def revoke(comm: MPI.Comm) -> None:
    """Make every call on a communicator raise, on all of its ranks. Not collective."""
    if comm and not comm.Is_revoked():
        comm.Revoke()


class Owner(Protocol):
    """What owns communicators of MPI."""

    def comms(self) -> list[MPI.Comm]:
        """Those that it has."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def register(owner: Owner) -> None:
    """As long as it lives, ``revoke_all`` reaches its communicators."""
    _owners.add(owner)


def revoke_all() -> None:
    """A rank has died: make every call that is under way, here and on other ranks, raise. Not collective."""
    for comm in _comms():
        revoke(comm)


def forget_all() -> None:
    """What is registered belongs to a world that is given up, also where somebody still holds it."""
    _owners.clear()


def _comms() -> list[MPI.Comm]:
    return [comm for owner in list(_owners) for comm in owner.comms()]


def missing(before: MPI.Comm, after: MPI.Comm) -> tuple[int, ...]:
    """The ranks of ``before`` that are not in ``after``."""
    old, new = before.Get_group(), after.Get_group()
    ranks = _taken(old.Difference(old, new), old)
    for group in (old, new):
        group.Free()
    return ranks


def _taken(group: MPI.Group, everyone: MPI.Group) -> tuple[int, ...]:
    """The ranks of a group, as they are numbered in another; the group is freed."""
    ranks = tuple(group.Translate_ranks(list(range(group.size)), everyone))
    group.Free()
    return ranks


def names_of_dead(before: MPI.Comm, after: MPI.Comm) -> str:
    """The ranks that are missing, as they were numbered at the launch."""
    everyone = sys.modules["mpi4py.MPI"].COMM_WORLD
    known = set(missing(everyone, before))
    return ", ".join(str(rank) for rank in missing(everyone, after) if rank not in known)


def died(what: str, comm: MPI.Comm, cause: Exception) -> RankDied:
    """The error of an operation that a death has ended."""
    everyone = comm.Get_group()
    ranks = _taken(comm.Get_failed(), everyone)
    everyone.Free()
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
    error = RankDied(f"{what}: {who} died; with mpi.elastic() the others can go on")
    error.__cause__ = cause
    return error
