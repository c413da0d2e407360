"""Reads of the memory of another process of this node: one copy, by the kernel.

The kernel lets a process read another process's memory if it may debug that process. Both must belong to one user and
one container, and no profile or security module may forbid it. MPI libraries move large messages in this way. A trial
read shows whether it works.
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
    """The memory of the ranks of a channel, each of which may read the others'; ``pids`` by rank."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Overwrite the contiguous CPU tensor ``into`` with the data at ``address`` of a rank.

        Raise CommunicatorError if that rank has died or the kernel refuses.
        """
        try:
            process_memory.read(self._pids[rank], address, into.data_ptr(), into.nbytes)
        except OSError as error:
            why = f"the memory of rank {rank} cannot be read: {error.strerror}"
            if error.errno == errno.ESRCH:
                why = f"rank {rank} has died"
            elif error.errno == errno.EFAULT:
                why += f" ({address:#x}). It has died, or it freed its tensor during the call"
            raise CommunicatorError(why) from error


def peer_memory(channel: Channel) -> PeerMemory | None:
    """Return the memory of the channel's ranks; None on all ranks if a rank may not read it. Collective."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    shown = ctypes.create_string_buffer(token, _TOKEN_BYTES)
    of_all = channel.mpi.allgather((os.getpid(), ctypes.addressof(shown), token))
    can_read = all(_can_read(*one) for one in of_all)
    # After this exchange all ranks have read, so ``shown`` may be freed.
    if all(channel.mpi.allgather(can_read)):
        return PeerMemory([pid for pid, *_ in of_all])
    logger.debug("the kernel does not let all ranks of this node read each other's memory: ordinary tensors are staged")
    return None


def is_readable(x: Tensor) -> bool:
    """Return whether other processes can read a tensor; they cannot on a GPU or in driver-mapped (pinned) memory."""
    if x.device.type != "cpu":
        return False
    last = x.data_ptr() + max(0, x.nbytes - 1)
    return x.nbytes == 0 or all(_can_read(os.getpid(), address, None) for address in (x.data_ptr(), last))


def _can_read(pid: int, address: int, token: bytes | None) -> bool:
    """Return whether a process holds the token (or any memory) there; in another container the pid may differ."""
    buffer = ctypes.create_string_buffer(1 if token is None else len(token))
    try:
        process_memory.read(pid, address, ctypes.addressof(buffer), len(buffer))
    except (OSError, AttributeError):  # The read is forbidden, the address is not mapped, or the call does not exist.
        return False
    return token is None or buffer.raw == token
