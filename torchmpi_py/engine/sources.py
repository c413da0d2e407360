"""Sources: datasets that are read together, each ahead of its use, at its own pace and by readers of its own.

An epoch goes through all sources in one order: the indices of a source follow those of the source before, as in torch's
ConcatDataset. A batch holds samples of any of them. Every source reads its samples of the next batches in a thread, or
in worker processes of torch's DataLoader, so that a slow database works ahead while files are read, and does not hold
them up before its own queue is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

T = TypeVar("T")

_END = object()  # behind the last item


def prefetched(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The same items, of which a thread computes up to ``depth`` ahead from now on; 0: no thread.

    Closing the generator ends the thread when the item under construction is done. An exception from ``items`` is
    raised at its place in the sequence, with its own traceback.
    """
    iterator = iter(items)
    if depth == 0:
        return (item for item in iterator)
    pool = ThreadPoolExecutor(1, "torchmpi_py prefetch")
    return _items(iterator, pool, deque(pool.submit(next, iterator, _END) for _ in range(depth)))


def _items(items: Iterator[T], pool: ThreadPoolExecutor, ahead: deque[Future[Any]]) -> Generator[T, None, None]:
    try:
        while (item := ahead.popleft().result()) is not _END:
            ahead.append(pool.submit(next, items, _END))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def loaded(dataset: Any, seed: int, **options: Any) -> Iterator[Any]:
    """Iterate over a DataLoader, whose workers begin here with this seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):  # the default device may be a GPU, and torch draws with the CPU's generator
        return iter(DataLoader(dataset, generator=generator, **options))


def items_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The samples; in one call if the dataset offers that (torch's own protocol for batched fetching)."""
    if callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


class Source:
    """One of several datasets of a ``DatasetIterator``, and how it is read.

    A database is opened by its reader, at the first sample, and not where the dataset is made: an open LMDB environment
    can be neither pickled nor taken along by a fork.

    Args:
        dataset: It has a length and is indexed by integers.
        prefetch: The number of batches whose samples are read ahead, by each worker. 0: inline, without a thread.
        num_workers: Processes that read, as those of torch's DataLoader, each with its copy of the dataset. They are
            started in each epoch by the thread that iterates. 0: one thread of this process.
        multiprocessing_context: How processes are started, as in torch ("fork", "spawn", "forkserver").

    Raises:
        TypeError: The dataset lacks a length or an index.
        ValueError: A number is below 0.
    """

    def __init__(
        self, dataset: Dataset[Any], *, prefetch: int = 2, num_workers: int = 0, multiprocessing_context: Any = None
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"Source: dataset is a {type(dataset).__name__}; it must have a length and be indexed")
        self.dataset: Any = dataset
        self.prefetch = at_least(0, "prefetch", prefetch)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self.multiprocessing_context = multiprocessing_context

    def read(self, pieces: list[list[int]], seed: int) -> Iterator[list[Any]]:
        """The samples of each piece, in turn, read ahead. The thread or the workers begin here."""
        if self.num_workers == 0:
            return prefetched((items_of(self.dataset, piece) for piece in pieces), self.prefetch)
        return loaded(self.dataset, seed, batch_sampler=pieces, collate_fn=list, **worker_options(self))


def worker_options(reader: Any) -> dict[str, Any]:
    """Return the arguments of a DataLoader that say how its worker processes read."""
    options = {"num_workers": reader.num_workers, "multiprocessing_context": reader.multiprocessing_context}
    return options | {"prefetch_factor": max(1, reader.prefetch)}


class Sources(ConcatDataset[Any]):
    """Several datasets as one, of which each batch is read by all sources at the same time."""

    def __init__(self, sources: Sequence[Source | Dataset[Any]]) -> None:
        self.sources = [each if isinstance(each, Source) else Source(each) for each in sources]
        self.sizes = [len(source.dataset) for source in self.sources]
        if 0 in self.sizes:
            raise ValueError(f"{self.name(self.sizes.index(0))} is empty: leave it out, or look where its samples are")
        super().__init__([source.dataset for source in self.sources])

    def name(self, number: int) -> str:
        """The source in an error: "source 1 (ImageFolder)"."""
        return f"source {number} ({type(self.sources[number].dataset).__name__})"

    def read(self, pieces: list[torch.Tensor], seed: int) -> Generator[list[Any], None, None]:
        """The samples of each piece of the epoch's order, in turn. The readers begin here; closing ends them.

        RuntimeError, with the number of the source, where a source raises.
        """
        indices = [piece.numpy() for piece in pieces]
        owners = [np.searchsorted(self.cumulative_sizes, piece, "right") for piece in indices]
        starts = [0, *self.cumulative_sizes]

        def of_source(number: int) -> list[list[int]]:
            parts = [piece[owner == number] for piece, owner in zip(indices, owners, strict=True)]
            return [(part - starts[number]).tolist() for part in parts if len(part)]

        # Processes first: a fork in the presence of threads that hold locks is a trap.
        by_processes_first = sorted(range(len(self.sources)), key=lambda number: -self.sources[number].num_workers)
        readers = {number: self.sources[number].read(of_source(number), seed + number) for number in by_processes_first}
        return self._merged(owners, [self._samples(*each) for each in sorted(readers.items())])

    def _merged(
        self, owners: list[np.ndarray[Any, Any]], samples: list[Generator[Any, None, None]]
    ) -> Generator[list[Any], None, None]:
        with ExitStack() as stack:
            for of_source in samples:
                stack.enter_context(closing(of_source))
            for owner in owners:
                yield [next(samples[number]) for number in owner]

    def _samples(self, number: int, reader: Iterator[list[Any]]) -> Generator[Any, None, None]:
        """The samples of a source, one by one."""
        try:
            for items in reader:
                yield from items
        except Exception as error:
            text = f"{self.name(number)} cannot be read: {type(error).__name__}: {error}"
            raise RuntimeError(text) from error


def set_epoch(of: Any, epoch: int) -> None:
    """Call ``of.set_epoch(epoch)`` of a sampler, stream or iterator that has the method."""
    if hasattr(of, "set_epoch"):
        of.set_epoch(epoch)


def at_least(least: int, name: str, value: int) -> int:
    """The value. TypeError if it is no integer, ValueError if it is below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    return value
