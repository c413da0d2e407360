"""Sources: datasets that are read together, each ahead of its use, at its own pace and by readers of its own.

An epoch goes through all sources in one order: the indices of a source follow those of the source before, as in torch's
ConcatDataset. A batch holds samples of any of them. Every source reads its samples of the next batches in a thread, or
in worker processes, so that a slow database works ahead while files are read, and does not hold them up before its
own queue is empty.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

T = TypeVar("T")

_END = object()  # behind the last item of a queue
_AT_EXIT_SECONDS = 5.0  # for an item under construction; a dataset may wait for a server that never answers


def prefetched(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The same items; a daemon thread computes up to ``depth`` of them ahead, 0: no thread.

    Closing the generator ends the thread: at once, or when the item under construction is done. An exception from
    ``items`` is raised here, in its place in the sequence, with its own traceback.
    """
    if depth == 0:
        yield from items
        return
    ahead = _Ahead(items, depth)
    try:
        while (item := ahead.ready.get()) is not _END:
            if isinstance(item, _Raised):
                raise item.error
            yield item
    finally:
        item = None  # an error and its frames are no circle: workers would end late when it is collected
        ahead.stop()
        ahead.thread.join()


class _Raised(NamedTuple):
    error: BaseException


class _Ahead:
    """The thread that computes items ahead, and their queue."""

    def __init__(self, items: Iterable[Any], depth: int) -> None:
        self.ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        arguments = items, self.ready, self._stopped
        self.thread = threading.Thread(target=_fill, args=arguments, name="torchmpi_py prefetch", daemon=True)
        _under_way.add(self)
        self.thread.start()

    def stop(self) -> None:
        """Let the thread end, at once or when the item under construction is done."""
        self._stopped.set()
        # The thread puts at most one item after the event is set: an emptied queue has room for it.
        while self.thread.is_alive() and not self.ready.empty():
            self.ready.get_nowait()


_under_way: weakref.WeakSet[_Ahead] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads of loops that have not come to the end: one in a function of torch's would abort the process."""
    deadline, last = time.monotonic() + _AT_EXIT_SECONDS, list(_under_way)
    for ahead in last:
        ahead.stop()  # all, before the wait: the thread of an iterator may wait for that of a source
    for ahead in last:
        ahead.thread.join(max(0.0, deadline - time.monotonic()))


def _fill(items: Iterable[Any], ready: queue.Queue[Any], stopped: threading.Event) -> None:
    try:
        for item in items:
            ready.put(item)
            if stopped.is_set():
                break
    except BaseException as error:  # raised again in the loop that uses the items
        ready.put(_Raised(error))
    if not stopped.is_set():
        ready.put(_END)
    else:
        with suppress(queue.Full):  # a thread that waits for an item has one then
            ready.put_nowait(_END)


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """``iter(loader)``, also where the default device is a GPU: the CPU's generator gives the seed that torch draws."""
    with torch.device("cpu"):
        return iter(loader)


class _Pieces:
    """The batch sampler of a DataLoader whose batches are given for each iteration."""

    def __init__(self) -> None:
        self.of_iteration: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.of_iteration)

    def __len__(self) -> int:
        return len(self.of_iteration)


class _Lock:
    """A lock that is copied, and pickled, as a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return _Lock, ()


class PieceLoader:
    """A DataLoader that is given the indices of its batches, and a seed, for each iteration."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        self._pieces, self._generator = _Pieces(), torch.Generator()
        self._latest: object = None  # the iteration for which lasting workers read
        self._lock = _Lock()  # each iteration may have a thread that reads ahead
        self.loader = DataLoader(dataset, batch_sampler=self._pieces, generator=self._generator, **options)

    def read(self, pieces: list[list[int]], seed: int) -> Generator[Any, None, None]:
        """The batches, in turn. The workers begin here.

        RuntimeError where lasting workers read for a later iteration before this one is over.
        """
        with self._lock:
            self._pieces.of_iteration = pieces
            self._generator.manual_seed(seed)
            self._latest = this = object()
            return self._read(begun(self.loader), this)

    def _read(self, batches: Iterator[Any], this: object) -> Generator[Any, None, None]:
        while True:
            with self._lock:
                if self.loader.persistent_workers and self._latest is not this:
                    raise RuntimeError(
                        "a second iteration, begun before the end of this one, has taken the worker processes: make a "
                        "loader, Source or iterator for each, or leave out the lasting workers"
                    )
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


def items_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The samples; in one call if the dataset offers that (torch's own protocol for batched fetching)."""
    if callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


class Source:
    """One of several datasets of a ``DatasetIterator``, and how it is read.

    dataset: has a length and is indexed by integers. prefetch: the number of batches whose samples are read ahead (0:
    inline, without a thread; with workers: for each of them). num_workers: processes that read, as those of torch's
    DataLoader, each with its copy of the dataset; 0: one thread of this process. multiprocessing_context: how they are
    started, as in torch ("fork", "spawn", "forkserver"; None: Python's default). They are started at the first epoch,
    by the thread that iterates, and kept.

    A database is opened by its reader, at the first sample, and not where the dataset is made: an open LMDB environment
    can be neither pickled nor taken along by a fork. Raises TypeError for a dataset without length and indexing,
    ValueError for an empty one and for numbers below 0.
    """

    def __init__(
        self, dataset: Dataset[Any], *, prefetch: int = 2, num_workers: int = 0, multiprocessing_context: Any = None
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"Source: dataset is a {type(dataset).__name__}; it must have a length and be indexed")
        self.dataset: Any = dataset
        self.prefetch = at_least(0, "prefetch", prefetch)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self._reader: PieceLoader | None = None
        if num_workers > 0:
            self._reader = PieceLoader(
                dataset,
                num_workers=num_workers,
                prefetch_factor=max(1, prefetch),
                collate_fn=list,
                multiprocessing_context=multiprocessing_context,
                persistent_workers=True,
            )

    def read(self, pieces: list[list[int]], seed: int) -> Generator[list[Any], None, None]:
        """The samples of each piece, in turn, read ahead. The thread or the workers begin here."""
        if self._reader is None:
            # An item in front, so that the thread begins now, and not when the first sample is asked for.
            reader = prefetched(chain([[]], (items_of(self.dataset, piece) for piece in pieces)), self.prefetch)
            next(reader)
            return reader
        return self._reader.read(pieces, seed)


class Sources(ConcatDataset[Any]):
    """Several datasets as one, of which each batch is read by all sources at the same time."""

    def __init__(self, sources: Sequence[Source | Dataset[Any]]) -> None:
        self.sources = [each if isinstance(each, Source) else Source(each) for each in sources]
        for number, source in enumerate(self.sources):
            if len(source.dataset) == 0:
                raise ValueError(f"{self.name(number)} is empty: leave it out, or look where its samples are")
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
            found = [piece[owner == number] for piece, owner in zip(indices, owners, strict=True)]
            return [(piece - starts[number]).tolist() for piece in found if len(piece)]

        # Processes first: a fork in the presence of threads that hold locks is a trap.
        by_processes_first = sorted(range(len(self.sources)), key=lambda number: -self.sources[number].num_workers)
        readers = {number: self.sources[number].read(of_source(number), seed + number) for number in by_processes_first}
        return self._merged(owners, [readers[number] for number in range(len(readers))])

    def _merged(
        self, owners: list[np.ndarray[Any, Any]], readers: list[Generator[list[Any], None, None]]
    ) -> Generator[list[Any], None, None]:
        with ExitStack() as stack:
            named = [stack.enter_context(closing(self._named(n, reader))) for n, reader in enumerate(readers)]
            for owner in owners:
                parts = {number: iter(next(named[number])) for number in np.unique(owner)}
                yield [next(parts[number]) for number in owner]

    def _named(self, number: int, reader: Generator[list[Any], None, None]) -> Generator[list[Any], None, None]:
        with closing(reader):
            try:
                yield from reader
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
