"""What is said between a rank and the service of another node (``exchange.py``, ``service.py``), and how.

A *request* is for one shard: its header, and the payload right behind it if it has one. The *answer* is the values that
were asked for, if any, and a header that says what went wrong. Headers hold plain numbers and bytes: what somebody's
rule or option is made of is unpickled by whoever can answer for it. Requests and answers have a communicator each, for
a rank may ask one service and be another. Messages of one sender with one tag arrive in order, and a rank asks each
shard one thing at a time, so the shard's number as the tag says what belongs together.
"""

from __future__ import annotations

import enum
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py import config, recovery
from torchmpi_py.channels import Channel
from torchmpi_py.errors import ParameterServerError

if TYPE_CHECKING:
    from mpi4py import MPI

HEADER_TAG = 0  # of all requests' headers; one service takes them from everybody


class Kind(enum.IntEnum):
    """What is asked."""

    APPLY = 0  # a rule, to the payload
    READ = 1  # the values
    SAVE = 2  # the memory of the shard
    RESTORE = 3  # the payload becomes the memory of the shard

    @property
    def gives(self) -> bool:
        """Whether bytes come with the answer, and not with the request."""
        return self in (Kind.READ, Kind.SAVE)


class Request(NamedTuple):
    """The header of a request. ``num_bytes`` come behind it, or with the answer."""

    server: int
    shard: int  # the rank that holds it
    kind: int
    num_bytes: int
    rule: bytes = b""  # name and options, pickled


class Links:
    """The two communicators of a channel; collective."""

    def __init__(self, channel: Channel) -> None:
        self.requests = channel.mpi.Dup()
        self.answers = channel.mpi.Dup()
        recovery.register(self)

    def comms(self) -> list[MPI.Comm]:
        """What MPI has to revoke when a rank dies."""
        return [self.requests, self.answers]

    def free(self) -> None:
        """Collective."""
        self.answers.Free()
        self.requests.Free()


def bytes_tag(shard: int) -> int:
    """Of a payload, or of values."""
    return 1 + 2 * shard


def answer_tag(shard: int) -> int:
    """Of an answer's header."""
    return 2 + 2 * shard


def pieces(x: Tensor) -> list[Any]:
    """The memory of a flat tensor, for MPI, in messages that are not too long."""
    return [part.numpy() for part in torch.split(x.view(torch.uint8), config.current.message_bytes)]


def packed(error: BaseException) -> bytes:
    """An exception for the journey; one that would not survive it, or is none of a rule's, as one of ours."""
    try:
        if isinstance(error, Exception):
            data = pickle.dumps(error)
            pickle.loads(data)
            return data
    except Exception:
        pass
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return pickle.dumps(ParameterServerError(text))


def unpacked(data: bytes) -> Exception:
    """The exception, or, if that is not known here, one of ours."""
    try:
        error: Exception = pickle.loads(data)
        return error
    except Exception as failure:
        return ParameterServerError(f"a shard on another node raised an error that cannot be read here: {failure}")
