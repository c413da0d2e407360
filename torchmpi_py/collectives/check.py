"""Check that all ranks have the same values: one small allgather exchanges a 128-bit digest of each tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from torchmpi_py.collectives import mpi_buffers, verbs
from torchmpi_py.collectives.numbers import NUMBERS, Number
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import check_tensor, flat
from torchmpi_py.errors import RanksDisagree


def check_with_allreduce(x: Tensor | Number, name: str = "", *, comm: Communicator | None = None) -> None:
    """Check that ``x`` is the same, bit for bit, on every rank.

    Every rank of ``comm`` must make this call. The dtype and the shape must also be the same. Instead of a tensor, the
    ranks exchange a digest of 16 bytes.

    Args:
        x (Tensor or number): value to compare.
        name (str): name of the value in the error; default "", shown as "the value".
        comm (Communicator): communicator whose ranks make this call; default None, the current level.

    Returns:
        None.

    Raises:
        RanksDisagree: the values differ; raised on every rank. The error lists the ranks that differ from the majority.
        TypeError: ``x`` is neither a tensor nor a number.
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> mpi.check_with_allreduce(torch.ones(3), "weights")
    """
    check_all_with_allreduce({name or "the value": x}, comm=comm)


def check_all_with_allreduce(values: Mapping[str, Tensor | Number], *, comm: Communicator | None = None) -> None:
    """Check several values, by name, in one exchange (see ``check_with_allreduce``).

    The error lists every value that differs.
    """
    resolved = resolve(comm)
    named = [
        f"{name} (rank {', '.join(map(str, odd))} of {resolved.size})"
        for name, odd in differing(values, resolved).items()
    ]
    if named:
        error = RanksDisagree(f"values must be the same on all ranks, but these differ: {'; '.join(named)}")
        raise error._of_call("check_with_allreduce", resolved)


def differing(values: Mapping[str, Tensor | Number], resolved: Communicator) -> dict[str, list[int]]:
    """Return the names of the values that differ between ranks, each with the ranks that differ from the majority.

    Every rank must make this call. Raise RanksDisagree if the ranks pass different names.
    """
    tables = verbs.allgather_object([(name, digest_of(x, name)) for name, x in values.items()], comm=resolved)
    names = [[name for name, _ in table] for table in tables]
    if any(own != names[0] for own in names):
        lists = "; ".join(f"rank {rank}: {', '.join(own)}" for rank, own in enumerate(names))
        raise RanksDisagree(f"the ranks check different values: {lists}")._of_call("check_with_allreduce", resolved)
    ranks_by_name = {}
    for position, name in enumerate(names[0]):
        digests = [table[position][1] for table in tables]
        usual = max(digests, key=digests.count)
        odd = [rank for rank, digest in enumerate(digests) if digest != usual]
        if odd:
            ranks_by_name[name] = odd
    return ranks_by_name


def digest_of(x: Tensor | Number, name: str = "x") -> bytes:
    """Return a digest (16 bytes) of a tensor's bits, dtype and shape; for a number, return its ``repr`` as bytes."""
    if isinstance(x, NUMBERS):
        return repr(x).encode()
    x = flat(check_tensor("check_with_allreduce", name, x).cpu())
    digest = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=16)
    digest.update(mpi_buffers.raw(x)[0])
    return digest.digest()
