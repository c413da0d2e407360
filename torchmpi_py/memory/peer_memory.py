"""Reads of memory that belongs to another process of this node: one copy, by the kernel.

The kernel lets a process read another one's memory if it may debug it: both of one user, in one container, and no
profile or security module forbids it. MPIs move large messages in this way. Whether it works is found by a trial.
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
    """The memory of the ranks of a channel, which all may read each other's; ``pids`` by rank."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Overwrite the contiguous CPU tensor ``into`` by what lies at ``address`` of a rank.

        CommunicatorError if that rank has died, or the kernel refuses.
        """
        try:
            process_memory.read(self._pids[rank], address, into.data_ptr(), into.nbytes)
        except OSError as error:
            why = f"the memory of rank {rank} cannot be read: {error.strerror}"
            if error.errno == errno.ESRCH:
                why = f"rank {rank} has died"
            elif error.errno == errno.EFAULT:
                why += f" ({address:#x}). It has died, or has freed its tensor in the middle of the call"
            raise CommunicatorError(why) from error


def peer_memory(channel: Channel) -> PeerMemory | None:
    """The memory of the channel's ranks, None on all of them if one may not read another's. Collective, on one node."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    shown = ctypes.create_string_buffer(token, _TOKEN_BYTES)
    of_all = channel.mpi.allgather((os.getpid(), ctypes.addressof(shown), token))
    can_read = all(_can_read(*one) for one in of_all)
    # In this meeting all have read: from here on ``shown`` may go.
    if all(channel.mpi.allgather(can_read)):
        return PeerMemory([pid for pid, *_ in of_all])
    logger.debug("the kernel does not let all ranks of this node read each other's memory: ordinary tensors are staged")
    return None


def is_readable(x: Tensor) -> bool:
    """Whether other processes can read a tensor: not on a GPU, nor in what a driver has mapped (pinned memory)."""
    if x.device.type != "cpu":
        return False
    last = x.data_ptr() + max(0, x.nbytes - 1)
    return x.nbytes == 0 or all(_can_read(os.getpid(), address, None) for address in (x.data_ptr(), last))


def _can_read(pid: int, address: int, token: bytes | None) -> bool:
    """Whether the token, or anything, is there. The same pid may be that of another process in this container."""
    taken = ctypes.create_string_buffer(1 if token is None else len(token))
    try:
        process_memory.read(pid, address, ctypes.addressof(taken), len(taken))
    except (OSError, AttributeError):  # not allowed, not mapped as memory; no such call on this system
        return False
    return token is None or taken.raw == token
