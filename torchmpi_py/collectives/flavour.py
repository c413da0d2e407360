"""What a flavour is: one way to carry out the verbs.

A flavour has a name, the device types it serves, and one blocking method per verb that it can do; not overriding a
method says that it cannot. Its arguments have been checked: tensors are flat, roots and ops are valid. ``comm`` is an
MPI communicator that nobody else is using. Adding a flavour takes a file and a row in ``registry.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from torchmpi_py import communication_thread, handles

if TYPE_CHECKING:
    from mpi4py import MPI

    from torchmpi_py.collectives.operation import Operation

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

    def missing(self) -> str:
        """Why this flavour cannot run here, and what would help; empty when it can."""
        return ""

    def implements(self, verb: str) -> bool:
        """Whether this flavour can do ``verb``."""
        return getattr(type(self), verb) is not getattr(Flavour, verb)

    def launch(self, operation: Operation[R]) -> handles.Handle[R]:
        """Start an operation without waiting for it: in the communication thread, unless a flavour has a better way."""
        return communication_thread.current().submit(operation)

    def broadcast(self, comm: MPI.Comm, x: Tensor, root: int) -> None:
        """Overwrite ``x`` by root's."""
        raise NotImplementedError

    def reduce(self, comm: MPI.Comm, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        """Root's ``destination`` becomes the reduction of all ``source``; on other ranks it is not touched."""
        raise NotImplementedError

    def allreduce(self, comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> None:
        """``destination`` becomes the reduction of all ``source``. The two are one tensor, or do not overlap."""
        raise NotImplementedError

    def allgather(self, comm: MPI.Comm, x: Tensor, out: Tensor | None) -> Tensor:
        """All ``x`` along dim 0, in ``out`` (checked against the sizes that the ranks tell) or a new tensor."""
        raise NotImplementedError

    def reduce_scatter(self, comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> None:
        """``destination`` becomes this rank's slice, along dim 0, of the reduction of all ``source``."""
        raise NotImplementedError

    def alltoall(self, comm: MPI.Comm, source: Tensor, destination: Tensor) -> None:
        """Slice s of ``destination`` becomes this rank's slice of rank s's ``source``."""
        raise NotImplementedError

    def gather(self, comm: MPI.Comm, x: Tensor, out: Tensor | None, root: int) -> Tensor | None:
        """As ``allgather`` on root; None elsewhere."""
        raise NotImplementedError

    def scatter(self, comm: MPI.Comm, source: Tensor, destination: Tensor, root: int) -> None:
        """``destination`` becomes this rank's slice of root's ``source``."""
        raise NotImplementedError

    def sendreceive(self, comm: MPI.Comm, x: Tensor, out: Tensor, source: int, destination: int) -> None:
        """Send ``x`` to ``destination`` and receive ``out`` from ``source``."""
        raise NotImplementedError

    def send(self, comm: MPI.Comm, x: Tensor, destination: int) -> None:
        """Send ``x``."""
        raise NotImplementedError

    def recv(self, comm: MPI.Comm, x: Tensor, source: int) -> None:
        """Overwrite ``x`` by what ``source`` sent."""
        raise NotImplementedError

    def broadcast_object(self, comm: MPI.Comm, obj: object, root: int) -> Any:
        """Root's object, by pickle."""
        raise NotImplementedError

    def allgather_object(self, comm: MPI.Comm, obj: object) -> list[Any]:
        """The objects of all ranks, by pickle."""
        raise NotImplementedError
