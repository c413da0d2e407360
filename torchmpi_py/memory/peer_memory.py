"""Read the memory of other processes on this node. The kernel copies the data once, directly between the processes.

The kernel lets a process read the memory of every process that it may debug. Both processes must belong to the same
user and container, and no profile or security module may forbid such reads. MPI libraries use them for large messages.
A trial read shows whether they are allowed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
from collections.abc import Sequence

from torch import Tensor

from torchmpi_py.core import process_memory
from torchmpi_py.core.channels import Channel
from torchmpi_py.errors import CommunicatorError

logger = logging.getLogger("torchmpi_py")
_TOKEN_BYTES = 16


class PeerMemory:
    """Read access to the memory of all ranks of a channel; ``pids`` lists their processes by rank."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Overwrite the contiguous CPU tensor ``into`` with the data at ``address`` in the memory of ``rank``.

        Raise CommunicatorError if the rank has died, or if the kernel refuses the read.
        """
        try:
            process_memory.read(self._pids[rank], address, into.data_ptr(), into.nbytes)
        except OSError as error:
            why = f"the memory of rank {rank} cannot be read: {error.strerror}"
            if error.errno == errno.ESRCH:
                why = f"rank {rank} has died"
            elif error.errno == errno.EFAULT:
                why += f" ({address:#x}). The rank has died, or has freed its tensor during the call"
            raise CommunicatorError(why) from error


def peer_memory(channel: Channel) -> PeerMemory | None:
    """Return read access to the memory of all ranks of the channel. All ranks of the channel must call it.

    Return None on all ranks if the kernel refuses the access on any rank.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    shown = ctypes.create_string_buffer(token, _TOKEN_BYTES)
    of_all = channel.mpi.allgather((os.getpid(), ctypes.addressof(shown), token))
    can_read = all(_can_read(*one) for one in of_all)
    # When this allgather returns, all ranks have read the token, so ``shown`` may be freed.
    if all(channel.mpi.allgather(can_read)):
        return PeerMemory([pid for pid, *_ in of_all])
    logger.debug("the kernel does not let all ranks read each other's memory, so they copy through shared memory")
    return None


def is_readable(x: Tensor) -> bool:
    """Return whether other processes can read a tensor in this process's memory.

    They cannot read tensors on a GPU, or in memory that a driver has mapped (pinned memory).
    """
    if x.device.type != "cpu":
        return False
    last = x.data_ptr() + max(0, x.nbytes - 1)
    return x.nbytes == 0 or all(_can_read(os.getpid(), address, None) for address in (x.data_ptr(), last))


def _can_read(pid: int, address: int, token: bytes | None) -> bool:
    """Return whether this process can read ``token`` at ``address`` of process ``pid``.

    With None for ``token``, any readable memory is enough. The token shows that ``pid`` is the right process, because
    another container numbers its processes differently.
    """
    buffer = ctypes.create_string_buffer(1 if token is None else len(token))
    try:
        process_memory.read(pid, address, ctypes.addressof(buffer), len(buffer))
    except (OSError, AttributeError):  # The read is forbidden, the address is not mapped, or the call does not exist.
        return False
    return token is None or buffer.raw == token
