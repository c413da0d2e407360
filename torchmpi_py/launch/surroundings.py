"""Preparation of this process before a job starts: HOME, the standard streams, and the limit of open files."""

import os
import resource

from torchmpi_py.errors import LaunchError

MOST_RANKS = 1 << 20
_FILES, _FILES_OF_A_RANK = 40, 6  # numbers of open files (measured with two ranks: Open MPI needs 32, MPICH 40)


def set_home() -> None:
    """Set HOME if it is not set, because Open MPI does not start without HOME. Some containers do not set HOME."""
    if "HOME" not in os.environ:
        home = os.path.expanduser("~")
        os.environ["HOME"] = "/" if home == "~" else home  # The result is "~" for a user ID without an account.


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed.

    With a closed stream, MPICH's mpirun fails, and the next file that is opened would get the stream's descriptor.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def raise_open_files(num_ranks: int) -> None:
    """Increase the limit of open files for the ranks of this host. Raise LaunchError if the hard limit is too low."""
    needed = _FILES + _FILES_OF_A_RANK * num_ranks
    if (limit := allow_open_files(needed)) < needed:
        raise LaunchError(
            f"the hard limit of open files is {limit}, but {num_ranks} ranks here need {needed}; "
            f"start fewer ranks, or raise it as root (ulimit -n {needed}, or nofile in limits.conf)"
        )


def allow_open_files(needed: int) -> int:
    """Increase the soft limit of open files to ``needed``, or to the hard limit if the hard limit is lower.

    Return ``needed``, or the hard limit if it is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if -1 < soft < most:  # -1 means no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
