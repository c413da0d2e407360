"""Prevent the MPI from using TCP between ranks of one host, so that no rank listens on a TCP port.

A program that connects to such a port could keep the rank busy, and shared memory suffices on one host. Each rank makes
this decision itself. A batch system may place the ranks, so only the variables of a rank show whether all ranks are on
one host.
"""

import os
import shutil
from collections.abc import Mapping

from torchmpi_py.launch import parameter_files, variables

COMPONENTS, _UCX = "OMPI_MCA_btl", "UCX_TLS"
_OF_ONE_HOST = {COMPONENTS: "^ofi,tcp", _UCX: "^tcp"}
# Space that a rank needs in /dev/shm. With less space, Open MPI needs TCP even between ranks of one host.
_SEGMENT_BYTES = 16 << 20


def leave_tcp_out(folder: str = "/dev/shm") -> None:
    """Prevent this rank from opening a TCP port if all ranks are on this host, unless the user has set a transport.

    Call this function before MPI starts. Do nothing if ``folder`` lacks space for shared memory. A single rank keeps
    TCP, because Open MPI has no other connection to ranks that this rank spawns.
    """
    size = variables.size_in(os.environ) or 1
    if not (1 < size == variables.local_size_in(os.environ) and _has_room(folder, size * _SEGMENT_BYTES)):
        return
    if not is_chosen("btl"):
        os.environ[COMPONENTS] = _OF_ONE_HOST[COMPONENTS]
    if "PMI_RANK" in os.environ:  # This is MPICH, which may use UCX.
        os.environ.setdefault(_UCX, _OF_ONE_HOST[_UCX])


def is_chosen(*names: str) -> bool:
    """Return whether the user or the site has set one of these Open MPI parameters, as a variable or in a file."""
    installed = (os.environ.get("MPI4PY_LIBMPI"), shutil.which("mpirun"), shutil.which("mpiexec"))
    return any(
        f"OMPI_MCA_{name}" in os.environ or parameter_files.have(name, "openmpi", os.environ, installed)
        for name in names
    )


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for another job, without the settings that `leave_tcp_out` has made in this rank.

    The other job may have several hosts, which need TCP.
    """
    ours = _OF_ONE_HOST if variables.has_mpi(environment) else {}
    return {name: value for name, value in environment.items() if ours.get(name) != value}


def _has_room(folder: str, num_bytes: int) -> bool:
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and status.f_bavail * status.f_frsize >= num_bytes
