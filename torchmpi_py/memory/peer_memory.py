"""Reads of memory that belongs to another process of this node: one copy, by the kernel.

The kernel lets a process read another one's memory if it may debug it: both of one user, in one container, and no
profile or security module forbids it. MPIs move large messages in this way. Whether it works is found by a trial.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmpi_py.core import process_memory
from torchmpi_py.core.channels import Channel
from torchmpi_py.errors import TorchMPIError

_TOKEN_BYTES = 16


class PeerMemory:
    """The memory of the ranks of a channel, which all may read each other's; ``pids`` by rank."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Overwrite the contiguous CPU tensor ``into`` by what lies at ``address`` of a rank.

        If that rank has died, ``into`` stays as it is: the next meeting finds out. TorchMPIError if the kernel refuses.
        """
        try:
            process_memory.read(self._pids[rank], address, into.data_ptr(), into.nbytes)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise TorchMPIError(
                    f"memory of rank {rank} at {address:#x} cannot be read ({error.strerror}): that rank has left the "
                    'call and freed its tensor, or it lies in memory of a device; flavour="mpi" does without'
                ) from None


def peer_memory(channel: Channel) -> PeerMemory | None:
    """The memory of the channel's ranks, None on all of them if one may not read another's. Collective, on one node."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    shown = ctypes.create_string_buffer(token, _TOKEN_BYTES)
    of_all = channel.mpi.allgather((os.getpid(), ctypes.addressof(shown), token))
    can_read = all(_can_read(*one) for one in of_all)
    # In this meeting all have read: from here on ``shown`` may go.
    return PeerMemory([pid for pid, *_ in of_all]) if all(channel.mpi.allgather(can_read)) else None


def is_readable(x: Tensor) -> bool:
    """Whether other processes can read a CPU tensor: not what a GPU's driver has mapped for itself."""
    return not (torch.cuda.is_initialized() and x.is_pinned())


def _can_read(pid: int, address: int, token: bytes) -> bool:
    """Whether the token is there: the same number may belong to another process in this container."""
    taken = ctypes.create_string_buffer(len(token))
    try:
        process_memory.read(pid, address, ctypes.addressof(taken), len(token))
    except (OSError, AttributeError):  # not allowed; no such call on this system
        return False
    return taken.raw == token
