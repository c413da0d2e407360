"""What is said between a rank and the service of another node (``exchange.py``, ``service.py``), and how.

A *request* is for one shard: its header (an object), and the payload right behind it if it has one. The *answer* is a
header, with what went wrong or None, and values before it if they were asked for. Requests and answers have a
communicator each, for a rank may ask one service and be another. Messages of one sender with one tag arrive in order,
and a rank asks each shard one thing at a time, so the shard's number as the tag says what belongs together.
"""

from __future__ import annotations

import enum
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py.channels import Channel
from torchmpi_py.errors import ParameterServerError

HEADER_TAG = 0  # of all requests' headers; one service takes them from everybody


class Kind(enum.Enum):
    """What is asked."""

    APPLY = "apply"  # a rule, to the payload
    READ = "read"  # the values
    SAVE = "save"  # the state
    RESTORE = "restore"  # the state


class Request(NamedTuple):
    """The header of a request. ``num_bytes`` are those of the payload, or of the values that are asked for."""

    server: int
    shard: int  # the rank that holds it
    kind: Kind
    num_bytes: int = 0
    rule: str = ""
    options: dict[str, Any] = {}  # never changed
    state: Any = None


class Answer(NamedTuple):
    """The header of an answer."""

    error: Exception | None
    state: Any = None


class Links:
    """The two communicators of a channel; collective."""

    def __init__(self, channel: Channel) -> None:
        self.requests = channel.mpi.Dup()
        self.answers = channel.mpi.Dup()

    def free(self) -> None:
        """Collective."""
        self.answers.Free()
        self.requests.Free()


def payload_tag(shard: int) -> int:
    """Of a payload, or of values."""
    return 1 + 2 * shard


def answer_tag(shard: int) -> int:
    """Of an answer's header."""
    return 2 + 2 * shard


def as_bytes(x: Tensor) -> Any:
    """The memory of a flat tensor, for MPI."""
    return x.view(torch.uint8).numpy()


def portable(error: Exception) -> Exception:
    """An exception that survives the journey."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return ParameterServerError(f"{type(error).__name__}: {error}")
