"""Detection of ranks that train on the same data, by digests of datasets and of the first batches.

A loop in which every rank has the same batches works, but all ranks only repeat the work of one rank.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from torchmpi_py.collectives import verbs
from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.state import State
from torchmpi_py.runtime import process

logger = logging.getLogger("torchmpi_py")

_NUM_BATCHES = 2  # One batch may be equal by chance.
_END = 1024  # number of elements in the digest from each end of a tensor or array
_BY_NAME = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class FirstBatches(Extension):
    """Warn on rank 0 after the second step if ranks had the same batches in both steps.

    The ranks exchange digests in the second step. ``AllReduceSGDEngine`` adds this extension unless there is one rank.
    """

    def __init__(self) -> None:
        self._digests: list[str | None] = []

    def on_update(self, state: State) -> None:
        """Store the digest of the batch, and compare the digests of all ranks after the second batch."""
        if len(self._digests) == _NUM_BATCHES:
            return
        mine = None
        with suppress(Exception):  # A rank with a batch that cannot be compared is omitted.
            mine = None if state.sample is None else digest(state.sample)
        self._digests.append(mine)
        if len(self._digests) == _NUM_BATCHES:
            _warn_of_equal(verbs.allgather_object(None if None in self._digests else tuple(self._digests)))

    def on_recovery(self, state: State) -> None:
        """Remove the digests, because the survivors may have stored different numbers of digests."""
        self._digests.clear()


def _warn_of_equal(digests: list[Any]) -> None:
    same = [[rank for rank, each in enumerate(digests) if each == one] for one in dict.fromkeys(digests) if one]
    texts = [", ".join(map(str, ranks)) for ranks in same if len(ranks) > 1]
    if texts and process.rank() == 0:
        logger.warning(
            "ranks %s of %d train on the same batches, so they do the same work. To divide the data, use "
            "DataLoader(dataset, ..., sampler=mpi.shard(dataset)) or DatasetIterator(dataset, ...). Your own sampler "
            "or IterableDataset must choose its part by mpi.rank() and mpi.size()",
            *("; ".join(texts), len(digests)),
        )


def digest(content: Any) -> str:
    """Return a digest that is equal in all processes for equal content.

    Only the first and the last elements of long tensors and arrays count. Content that cannot be pickled, such as a
    connection or a generator, raises pickle's error.
    """
    hasher = hashlib.blake2b(digest_size=8)
    pickler = _Pickler(SimpleNamespace(write=hasher.update), protocol=5)
    pickler.fast = True  # Switch off the memo: equal strings may be one object in one process, and two in another.
    pickler.dump(content)
    return hasher.hexdigest()


class _Pickler(pickle.Pickler):
    def persistent_id(self, content: Any) -> Any:
        """Return the replacement of an object in the pickle, or None to pickle the object as usual."""
        if isinstance(content, torch.Tensor):
            if content.layout is not torch.strided or content.is_quantized or content.is_meta:
                raise TypeError(f"cannot compare a tensor of layout {content.layout} and dtype {content.dtype}")
            x = content.detach().reshape(-1)
            ends = torch.cat([x[:_END], x[-_END:]]).resolve_conj().resolve_neg().cpu()
            return str(x.dtype), tuple(content.shape), ends.view(torch.uint8).numpy().tobytes()
        if isinstance(content, np.ndarray) and not content.dtype.hasobject:
            flat = content.reshape(-1)
            return str(content.dtype), content.shape, flat[:_END].tobytes(), flat[-_END:].tobytes()
        if isinstance(content, (set, frozenset)):
            return sorted(map(repr, content))  # The order of a set is random.
        return getattr(content, "__qualname__", content.__name__) if isinstance(content, _BY_NAME) else None
