"""Verbs for Python objects: as in ``verbs``, every rank makes the same calls, and each has an asynchronous twin.

Objects travel by pickle and come from the other ranks of the job: trust them as you trust your own program.
"""

from __future__ import annotations

from typing import Any

from torchmpi_py.collectives.forms import forms
from torchmpi_py.collectives.operands import of_object
from torchmpi_py.collectives.operation import Operation
from torchmpi_py.communicators import Communicator, resolve
from torchmpi_py.tensors import check_rank


def _broadcast_object(
    obj: object, root: int = 0, *, comm: Communicator | None = None, flavour: str | None = None
) -> Operation[Any]:
    """Return root's object; the other ranks pass anything."""
    comm = resolve(comm)
    root = check_rank("broadcast_object", "root", root, comm.size)
    return of_object("broadcast_object", comm, flavour, (obj, root))


def _allgather_object(
    obj: object, *, comm: Communicator | None = None, flavour: str | None = None
) -> Operation[list[Any]]:
    """Return the list of all ranks' objects, in rank order; they must be picklable."""
    return of_object("allgather_object", resolve(comm), flavour, (obj,))


broadcast_object, broadcast_object_async = forms(_broadcast_object)
allgather_object, allgather_object_async = forms(_allgather_object)
