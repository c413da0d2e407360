"""Whether two ranks train on the same data: digests of the first batches travel with what is reduced anyway.

A loop that gives every rank the same batches runs, as slow as on many ranks and with the result of one. So the ranks
compare digests of their first batches, or, in a loop that shows none, of the gradients before their first reductions,
which are equal where the batches are. A digest is laid into this rank's slot behind the flags of the last of these
reductions (``Buckets.has_gradient_here``), which goes by ``max``: no collective is added.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pickle
from collections.abc import Iterable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmpi_py.core.communicators import Communicator

logger = logging.getLogger("torchmpi_py")

_NUM_PASSES = 2  # one batch may be the same by chance
_BYTES = 8  # of a digest
_NO_DIGEST = b"\0" * _BYTES
_HEAD = 1024  # elements of a gradient
_END_BYTES = 4096  # at both ends of long data
_END_ITEMS = 256
_DEPTH = 12  # of containers in containers
_MOST_PIECES = 50_000
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class FirstBatches:
    """The data of this rank's first backward passes. All ranks of ``comm`` make the same passes.

    alike: whether ranks may have the same data, as those do that share split parameters; then nothing is compared.
    """

    def __init__(self, comm: Communicator, *, alike: bool = False) -> None:
        self.comm = comm
        self._passes_left = _NUM_PASSES if comm.size > 1 and not alike else 0
        self._of_passes: list[bytes] = []
        self._batch: bytes | None = None  # of the pass under way
        self._gradients: list[bytes] = []

    def set_batch(self, batch: Any | None) -> None:
        """Set the batch of the next pass; None for one that cannot be compared, such as a stand-in."""
        if self._passes_left:
            self._batch = _NO_DIGEST if batch is None else short_digest(batch)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """``add_gradient`` for each parameter; nothing after the first passes."""
        if self._passes_left:
            for parameter in parameters:
                self.add_gradient(parameter)

    def add_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Add a gradient that is not reduced yet to those of the pass, if its batch is unknown. Zeros do not count."""
        if self._passes_left and self._batch is None and parameter.grad is not None:
            gradient = parameter.grad.detach()
            parts = [gradient._values(), gradient._indices()] if gradient.is_sparse else [gradient]
            heads = [part.reshape(-1)[:_HEAD] for part in parts]
            if heads[0].any():
                self._gradients.append(short_digest(heads))

    def append_digests(self, flags: Tensor) -> Tensor:
        """End a pass. The flags, to be reduced by ``max``; in the last pass that counts with a slot for each rank."""
        if not self._passes_left:
            return flags
        self._passes_left -= 1
        gradients = short_digest(self._gradients) if self._gradients else _NO_DIGEST
        self._of_passes.append(gradients if self._batch is None else self._batch)
        self._batch, self._gradients = None, []
        if self._passes_left:
            return flags
        slots = torch.zeros(self.comm.size, _BYTES, dtype=torch.uint8, device="cpu")
        if _NO_DIGEST not in self._of_passes:
            slots[self.comm.rank] = torch.tensor(list(short_digest(self._of_passes)), dtype=torch.uint8, device="cpu")
        return torch.cat([flags, slots.view(-1)])

    def warn_of_equal(self, slots: Tensor) -> None:
        """Warn, on rank 0, if two ranks have the same digest. slots: the bytes behind the reduced flags, maybe none."""
        if self.comm.rank > 0 or slots.numel() == 0:
            return
        ranks_of: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(slots.view(-1, _BYTES)):
            ranks_of.setdefault(bytes(digest.tolist()), []).append(rank)
        ranks_of.pop(_NO_DIGEST, None)
        same = [", ".join(map(str, ranks)) for ranks in ranks_of.values() if len(ranks) > 1]
        if same:
            warn_once("; ".join(same), self.comm.size)


@functools.cache
def warn_once(ranks: str, size: int) -> None:
    """Log the warning; the same one is logged once a process."""
    logger.warning(
        "ranks %s of %d train on the same batches, so that they do the same work: give each its share, with "
        "DataLoader(dataset, ..., sampler=mpi.shard(dataset)) or DatasetIterator(dataset, ...); a sampler or an "
        "IterableDataset of your own takes its part by mpi.rank() and mpi.size()",
        ranks,
        size,
    )


def short_digest(content: Any) -> bytes:
    """8 bytes that are equal where the content is: of a batch, or of a dataset, from which no sample is read.

    Of long tensors, arrays, texts and lists the length and both ends count; of objects with a length and an index (a
    dataset) the attributes; of any other object its type.
    """
    digest = hashlib.blake2b(digest_size=8)
    for piece in islice(_pieces(content, _DEPTH), _MOST_PIECES):
        digest.update(piece)
    return digest.digest()


def whole_digest(content: Any) -> bytes:
    """8 bytes that are equal where all of the content is, for instance of a sample; of objects their pickled state.

    Raises what pickling raises for content that cannot be pickled.
    """
    digest = hashlib.blake2b(digest_size=8)
    pickler = _ContentPickler(SimpleNamespace(write=digest.update), protocol=5)
    pickler.fast = True  # no memo: which strings, say, are one object is chance
    pickler.dump(content)
    return digest.digest()


class _ContentPickler(pickle.Pickler):
    """Pickles tensors by their bytes; torch's own way has addresses in it, which differ between processes."""

    def reducer_override(self, content: Any) -> Any:
        if not isinstance(content, torch.Tensor):
            return NotImplemented
        x = content.detach()
        if x.layout is torch.sparse_coo:
            return tuple, ((tuple(x.shape), x._indices(), x._values()),)
        if x.layout is not torch.strided or x.is_quantized or x.is_meta:
            raise pickle.PicklingError(f"the content of a tensor of layout {x.layout}, {x.dtype} is not compared")
        return tuple, ((f"{x.dtype} {tuple(x.shape)}", _raw(x.resolve_conj().resolve_neg().reshape(-1))),)


def _pieces(content: Any, depth: int) -> Iterable[bytes]:
    yield type(content).__qualname__.encode()
    if isinstance(content, torch.Tensor):
        yield from _of_tensor(content.detach())
    elif isinstance(content, np.ndarray):
        yield f"{content.dtype} {content.shape}".encode()
        yield from (b"",) if content.dtype.hasobject else map(np.ndarray.tobytes, _ends(content.reshape(-1)))
    elif isinstance(content, _PLAIN):
        yield from (_bytes_of(end) for end in _ends(content if isinstance(content, (str, bytes)) else repr(content)))
    elif depth > 0:
        for part in _parts(content):
            yield from _pieces(part, depth - 1)


def _of_tensor(x: torch.Tensor) -> Iterable[bytes]:
    yield f"{x.dtype} {tuple(x.shape)}".encode()
    if x.layout is torch.strided and not (x.is_quantized or x.is_meta):
        flat = x.resolve_conj().resolve_neg().reshape(-1)
        yield from map(_raw, _ends(flat))


def _raw(flat: torch.Tensor) -> bytes:
    flat = flat.contiguous().cpu().as_strided((flat.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().tobytes()


def _parts(content: Any) -> Iterable[Any]:
    """The parts of a container, or of an object that is used as one."""
    try:
        yield len(content)
    except Exception:  # no container, or a closed file that a dataset holds
        return
    if isinstance(content, dict):
        yield from (part for item in islice(content.items(), _END_ITEMS) for part in item)
    elif isinstance(content, (list, tuple, range)):
        yield from (part for end in (content[:_END_ITEMS], content[-_END_ITEMS:]) for part in end)
    elif hasattr(content, "__getitem__") and hasattr(content, "__dict__"):
        yield vars(content)


def _ends(flat: Any) -> tuple[Any, Any]:
    count = _END_BYTES // getattr(flat, "itemsize", 1)
    return flat[:count], flat[-count:]


def _bytes_of(text: str | bytes) -> bytes:
    return text.encode(errors="surrogatepass") if isinstance(text, str) else text
