"""Several datasets that are read together. Each dataset has its own readers, which read ahead at their own speed.

An epoch visits the samples of all sources in one order. The indices of a source follow the indices of the previous
source, as in torch's ConcatDataset, and a batch may contain samples of several sources. Each source reads its samples
of the next batches in a thread, or in worker processes of torch's DataLoader. So a slow source, such as a database,
delays the other sources only when its own queue of samples is empty.

Alternative: one DataLoader over a ConcatDataset. Why not: each worker reads its samples one after another, so a slow
source delays all samples of a batch.
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

_END = object()  # sentinel after the last item


def prefetched(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Return a generator of the items. A thread computes up to ``depth`` items in advance; 0 means no thread.

    The thread starts in this call. Closing the generator ends the thread after its current item. If ``items`` raises an
    exception, the generator raises it after the earlier items, with the original traceback.
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
    """Return an iterator over a new DataLoader. Its workers start in this call, with this seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):  # The default device may be a GPU, but torch draws with a generator on the CPU.
        return iter(DataLoader(dataset, generator=generator, **options))


def items_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Return the samples, in one call if the dataset has ``__getitems__`` (torch's protocol for batched fetching)."""
    if callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


class Source:
    """One of several datasets of a ``DatasetIterator``, with its own readers.

    If the dataset reads a database, open the database at the first sample, not when you create the dataset. An open
    LMDB environment can be neither pickled nor inherited by a fork.

    Args:
        dataset (Dataset): object with a length and an integer index.
        prefetch (int): number of batches whose samples each worker reads in advance, or 0 for no thread; default 2.
        num_workers (int): number of worker processes, as in torch's DataLoader, each with its own copy of the dataset.
            The iterating thread starts the workers in each epoch. Default 0: one thread of this process reads.
        multiprocessing_context (str): start method of the processes, as in torch ("fork", "spawn", "forkserver");
            default None: Python's default.

    Raises:
        TypeError: the dataset has no length or no index.
        ValueError: a number is below 0.

    Examples:
        >>> images = torch.utils.data.TensorDataset(torch.randn(8, 4))
        >>> texts = torch.utils.data.TensorDataset(torch.randn(8, 4))
        >>> sources = [mpi.engine.Source(images, prefetch=4), mpi.engine.Source(texts)]
        >>> iterator = mpi.engine.DatasetIterator(sources, batch_size=4)
        >>> iterator.total
        16
    """

    def __init__(
        self, dataset: Dataset[Any], *, prefetch: int = 2, num_workers: int = 0, multiprocessing_context: Any = None
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"Source: dataset is a {type(dataset).__name__}; define its __len__ and __getitem__")
        self.dataset: Any = dataset
        self.prefetch = at_least(0, "prefetch", prefetch)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self.multiprocessing_context = multiprocessing_context

    def read(self, pieces: list[list[int]], seed: int) -> Iterator[list[Any]]:
        """Return an iterator over the samples of each piece. The thread or the workers read ahead from this call on.

        Args:
            pieces (list): lists of indices.
            seed (int): seed of the worker processes.
        """
        if self.num_workers == 0:
            return prefetched((items_of(self.dataset, piece) for piece in pieces), self.prefetch)
        return loaded(self.dataset, seed, batch_sampler=pieces, collate_fn=list, **worker_options(self))


def worker_options(reader: Any) -> dict[str, Any]:
    """Return the options of a DataLoader for the worker processes of ``reader``."""
    options = {"num_workers": reader.num_workers, "multiprocessing_context": reader.multiprocessing_context}
    return options | {"prefetch_factor": max(1, reader.prefetch)}


class Sources(ConcatDataset[Any]):
    """Several datasets, combined into one. All sources read their samples of a batch at the same time."""

    def __init__(self, sources: Sequence[Source | Dataset[Any]]) -> None:
        self.sources = [each if isinstance(each, Source) else Source(each) for each in sources]
        self.sizes = [len(source.dataset) for source in self.sources]
        if 0 in self.sizes:
            raise ValueError(f"{self.name(self.sizes.index(0))} is empty; omit it, or check the path of its samples")
        super().__init__([source.dataset for source in self.sources])

    def name(self, number: int) -> str:
        """Return the source's name for error messages, such as "source 1 (ImageFolder)"."""
        return f"source {number} ({type(self.sources[number].dataset).__name__})"

    def read(self, pieces: list[torch.Tensor], seed: int) -> Generator[list[Any], None, None]:
        """Return a generator of the samples of each piece. The readers start in this call.

        Closing the generator ends the readers. If a source raises an error, the generator raises RuntimeError with the
        name of the source.
        """
        indices = [piece.numpy() for piece in pieces]
        owners = [np.searchsorted(self.cumulative_sizes, piece, "right") for piece in indices]
        starts = [0, *self.cumulative_sizes]

        def of_source(number: int) -> list[list[int]]:
            parts = [piece[owner == number] for piece, owner in zip(indices, owners, strict=True)]
            return [(part - starts[number]).tolist() for part in parts if len(part)]

        # Start the processes before the threads, because a fork copies locks that other threads hold.
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
        """Yield the samples of a source. An error of the source is raised as RuntimeError, with the source's name."""
        try:
            for items in reader:
                yield from items
        except Exception as error:
            text = f"{self.name(number)} cannot be read: {type(error).__name__}: {error}"
            raise RuntimeError(text) from error


def set_epoch(of: Any, epoch: int) -> None:
    """Call ``of.set_epoch(epoch)`` if the sampler, stream or iterator has this method."""
    if hasattr(of, "set_epoch"):
        of.set_epoch(epoch)


def at_least(least: int, name: str, value: int) -> int:
    """Return ``value``. Raise TypeError if it is not an integer, or ValueError if it is below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: pass an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name}={value}: pass an integer of at least {least}")
    return value
