"""A network of the job's own: no other user of the host reaches its ports, those of the MPI's starter included.

torchmpirun itself moves into new user and network namespaces, and all that it starts is born there. The new network has
a loopback and nothing else. In the user namespace this user's id stays the same; processes and files of other users
show as owned by the user "nobody".
"""

import argparse
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import allocation

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of unshare(2); os.unshare is Python 3.12's
_SET_FLAGS, _UP = 0x8914, 1  # of an interface
_REMEDY = (
    "in a container: docker run --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN; else the administrator may "
    "allow it (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns); or leave --private out"
)


def check(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """LaunchError if the job needs a network: for other hosts, or for srun, which asks Slurm's controller."""
    named = [host.name for host in allocation.place(1, options.hosts, options.hostfile, environment).hosts]
    if named or options.mpi == "srun" or environment.get("SLURM_JOB_NUM_NODES", "1") != "1":
        raise LaunchError(
            f"--private is for jobs of this host alone, without a network; found {', '.join(named) or 'Slurm'}: leave "
            "out --private, or the other hosts and --mpi srun"
        )


def enter() -> None:
    """Move this process, which has one thread, into a network of its own. LaunchError where that is not allowed."""
    user, group, libc = os.geteuid(), os.getegid(), ctypes.CDLL(None, use_errno=True)
    step = "unshare(CLONE_NEWUSER | CLONE_NEWNET)"
    try:
        if libc.unshare(_NEW_USER | _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
            step = f"a write to /proc/self/{name}"
            Path("/proc/self", name).write_text(text)
        step = "the start of the loopback interface"
        with socket.socket() as some_socket:
            fcntl.ioctl(some_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))
    except OSError as error:
        raise LaunchError(f"--private: the system refuses {step} to user {user}: {error.strerror}; {_REMEDY}") from None
