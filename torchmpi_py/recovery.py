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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchmpi_py.errors import RankDied

if TYPE_CHECKING:
    from mpi4py import MPI


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the MPI of this job tells the survivors that a rank died, instead of ending the job."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled", "t", "y")


def is_death(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that a rank has died, or that another one has noticed."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not is_elastic():
        return False
    classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    while error is not None:
        if isinstance(error, mpi.Exception) and error.Get_error_class() in classes:
            return True
        error = error.__cause__ or error.__context__
    return False


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


def missing(before: MPI.Comm, after: MPI.Comm) -> tuple[int, ...]:
    """The ranks of ``before`` that are not in ``after``."""
    old, new = before.Get_group(), after.Get_group()
    lost = old.Difference(old, new)
    ranks = lost.Translate_ranks(list(range(lost.size)), old)
    for group in (old, new, lost):
        group.Free()
    return tuple(ranks)


def died(what: str, comm: MPI.Comm, cause: Exception) -> RankDied:
    """The error of an operation that a death has ended."""
    failed, everyone = comm.Get_failed(), comm.Get_group()
    ranks = list(failed.Translate_ranks(list(range(failed.size)), everyone))
    everyone.Free()
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
    error = RankDied(f"{what}: {who} died; with mpi.elastic() the others can go on")
    error.__cause__ = cause
    return error
