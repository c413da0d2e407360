"""Whether ranks have the same data: digests of datasets, and of the first batches.

A loop that gives every rank the same batches runs, as slowly as on many ranks and with the result of one.
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

_NUM_BATCHES = 2  # one batch may be the same by chance
_END = 1024  # elements at both ends of a tensor or array, which count
_BY_NAME = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class FirstBatches(Extension):
    """Have rank 0 warn after the second step if ranks have had the same batches. Collective then.

    ``AllReduceSGDEngine`` adds it on several ranks.
    """

    def __init__(self) -> None:
        self._digests: list[str | None] = []

    def on_update(self, state: State) -> None:
        """Note the batch, and compare after the second one."""
        if len(self._digests) == _NUM_BATCHES:
            return
        mine = None
        with suppress(Exception):  # of a batch that cannot be compared
            mine = None if state.sample is None else digest(state.sample)
        self._digests.append(mine)
        if len(self._digests) == _NUM_BATCHES:
            _warn_of_equal(verbs.allgather_object(None if None in self._digests else tuple(self._digests)))

    def on_recovery(self, state: State) -> None:
        """Begin again, because a death may have come between the ranks."""
        self._digests.clear()


def _warn_of_equal(digests: list[Any]) -> None:
    same = [[rank for rank, each in enumerate(digests) if each == one] for one in dict.fromkeys(digests) if one]
    texts = [", ".join(map(str, ranks)) for ranks in same if len(ranks) > 1]
    if texts and process.rank() == 0:
        logger.warning(
            "ranks %s of %d train on the same batches, so that they do the same work: give each its share, with "
            "DataLoader(dataset, ..., sampler=mpi.shard(dataset)) or DatasetIterator(dataset, ...); a sampler or an "
            "IterableDataset of your own takes its part by mpi.rank() and mpi.size()",
            *("; ".join(texts), len(digests)),
        )


def digest(content: Any) -> str:
    """A text that is equal where the content is, in all processes; of long tensors and arrays both ends count.

    Raises what pickling raises for content that cannot be pickled, such as a connection or a generator.
    """
    hasher = hashlib.blake2b(digest_size=8)
    pickler = _Pickler(SimpleNamespace(write=hasher.update), protocol=5)
    pickler.fast = True  # no memo: which strings, say, are one object is chance
    pickler.dump(content)
    return hasher.hexdigest()


class _Pickler(pickle.Pickler):
    def persistent_id(self, content: Any) -> Any:
        """What stands for an object in the pickle, in place of its own way; None for its own way."""
        if isinstance(content, torch.Tensor):
            if content.layout is not torch.strided or content.is_quantized or content.is_meta:
                raise TypeError(f"a tensor of layout {content.layout}, {content.dtype} is not compared")
            x = content.detach().reshape(-1)
            ends = torch.cat([x[:_END], x[-_END:]]).resolve_conj().resolve_neg().cpu()
            return str(x.dtype), tuple(content.shape), ends.view(torch.uint8).numpy().tobytes()
        if isinstance(content, np.ndarray) and not content.dtype.hasobject:
            flat = content.reshape(-1)
            return str(content.dtype), content.shape, flat[:_END].tobytes(), flat[-_END:].tobytes()
        if isinstance(content, (set, frozenset)):
            return sorted(map(repr, content))  # their own order is chance
        return getattr(content, "__qualname__", content.__name__) if isinstance(content, _BY_NAME) else None
