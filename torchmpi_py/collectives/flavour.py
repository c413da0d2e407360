"""What a flavour is: one way to carry out the verbs.

A flavour has a name, the device types it serves, and one blocking method per verb that it can do; not overriding a
method says that it cannot. Its arguments have been checked: tensors are flat, roots and ops are valid, and ``channel``
is one that no other thread is using. Adding a flavour takes a file and a row in ``registry.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from torchmpi_py import handles, streams

if TYPE_CHECKING:
    from torchmpi_py.channels import Channel
    from torchmpi_py.collectives.gathering import Sizes
    from torchmpi_py.collectives.operation import Operation
    from torchmpi_py.communicators import Communicator

R = TypeVar("R")

VERBS = (
    "broadcast",
    "reduce",
    "allreduce",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
    "sendreceive",
    "send",
    "recv",
    "broadcast_object",
    "allgather_object",
)


class Flavour:
    """The contract. ``x``, ``source`` and ``destination`` are flat tensors; results are written into them."""

    name: ClassVar[str]
    devices: ClassVar[frozenset[str]]
    meets_first: ClassVar[bool] = False
    """Whether its ranks tell each other what they are about to do, and all raise if that differs."""

    def missing(self, device: str) -> str:
        """Why this flavour cannot serve tensors of a device type (one of ``devices``) here, and what would help; or "".

        The same on all ranks.
        """
        return ""

    def refuses(self, comm: Communicator | Channel) -> str:
        """Why this flavour cannot serve this communicator; empty when it can. The same on all its ranks."""
        return ""

    def implements(self, verb: str) -> bool:
        """Whether this flavour can do ``verb``."""
        return getattr(type(self), verb) is not getattr(Flavour, verb)

    def launch(self, operation: Operation[R]) -> handles.Handle[R]:
        """Start an operation without waiting for it: in the communication thread, unless a flavour has a better way."""
        return streams.submit(operation, operation.device, operation.tensors)

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        """Overwrite ``x`` by root's."""
        raise NotImplementedError

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        """Root's ``destination`` becomes the reduction of all ``source``; on other ranks it is not touched."""
        raise NotImplementedError

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        """``destination`` becomes the reduction of all ``source``. The two are one tensor, or do not overlap."""
        raise NotImplementedError

    def begin_allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> Callable[[], None]:
        """Start an allreduce, and return what completes it: at once, unless a flavour can do other work meanwhile."""
        self.allreduce(channel, source, destination, op)
        return _nothing

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        """``out`` becomes all ``x`` along dim 0; ``sizes`` tells what each rank brings."""
        raise NotImplementedError

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        """``destination`` becomes this rank's slice, along dim 0, of the reduction of all ``source``."""
        raise NotImplementedError

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        """Slice s of ``destination`` becomes this rank's slice of rank s's ``source``."""
        raise NotImplementedError

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        """As ``allgather`` on root; elsewhere ``out`` is None."""
        raise NotImplementedError

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        """``destination`` becomes this rank's slice of root's ``source``."""
        raise NotImplementedError

    def sendreceive(self, channel: Channel, x: Tensor, out: Tensor, source: int, destination: int) -> None:
        """Send ``x`` to ``destination`` and receive ``out`` from ``source``."""
        raise NotImplementedError

    def send(self, channel: Channel, x: Tensor, destination: int) -> None:
        """Send ``x``."""
        raise NotImplementedError

    def recv(self, channel: Channel, x: Tensor, source: int) -> None:
        """Overwrite ``x`` by what ``source`` sent."""
        raise NotImplementedError

    def broadcast_object(self, channel: Channel, obj: object, root: int) -> Any:
        """Root's object, by pickle."""
        raise NotImplementedError

    def allgather_object(self, channel: Channel, obj: object) -> list[Any]:
        """The objects of all ranks, by pickle."""
        raise NotImplementedError


def _nothing() -> None:
    """What is left to do when all is done."""
