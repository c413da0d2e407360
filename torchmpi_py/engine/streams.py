"""Streams: sequences of samples without a length or an index, which are divided among ranks and workers.

Terms. A stream consists of *pieces*. The pieces of a ``Shards`` are its files. Any other IterableDataset has n pieces,
where n is the number of *readers*; piece k contains every n-th sample, from sample k on. The readers are the worker
processes of all ranks, or the ranks if there are no workers. The order of the pieces in an epoch is drawn from
(seed, epoch). The pieces are dealt to the readers like cards. Each piece is read by one reader, from the first sample
to the last.

The idea: ranks may have different numbers of samples, which no rank knows in advance. So in each step the ranks
exchange how many samples they have. A rank that has no more samples gets None as its batch, and its gradients count as
zero (torch's Join has the same rule). The epoch ends when no rank has samples. The batches are weighted as in
``iterators``, so the average of the gradients is the average over the samples of all ranks. Alternative: end the epoch
when the first rank has no more samples (``drop_last``). Why not always: the remaining samples are lost.

In the exchange, the ranks also learn which piece each reader has reached, and how many samples of the piece are used.
So every rank knows the rest of the epoch: the pieces that no reader has started, and the unused parts of the started
pieces. The same ranks, or the survivors of a death, can continue from this state. To continue a started piece, a reader
reads the piece from its beginning, and skips the used samples.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from torchmpi_py.collectives import verbs
from torchmpi_py.engine.batches import BatchIterator, IterationPlace, adopted, logger, moved
from torchmpi_py.engine.same_batches import digest
from torchmpi_py.engine.sources import at_least, loaded, prefetched, set_epoch, worker_options


class Shards(IterableDataset[Any]):
    """A stream of files. Each file is read by one worker or rank.

    Args:
        files (str or sequence): a ``glob`` pattern, whose files are sorted by name, or a list of arguments for ``read``
            (paths, URLs, ranges of a table).
        read (callable): function that returns an iterable over the samples of one file. Every call for the same file
            must return the same samples in the same order. The function may run in a worker process or a thread.

    Raises:
        ValueError: there are no files.

    Examples:
        >>> stream = mpi.engine.Shards(["a", "b", "c", "d"], lambda file: [file + "1", file + "2"])
        >>> list(stream)[:3]
        ['a1', 'a2', 'b1']
    """

    def __init__(self, files: str | Sequence[Any], read: Callable[[Any], Iterable[Any]]) -> None:
        self.files = sorted(glob.glob(files)) if isinstance(files, str) else list(files)
        self.read = read
        if not self.files:
            raise ValueError(f"Shards({files!r}): expected at least one file, found none; check the pattern or list")

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self.files)):
            yield from self.read_piece(number)

    def read_piece(self, number: int) -> Iterator[Any]:
        """Yield the samples of one file.

        Args:
            number (int): number of the file in ``files``.

        Raises:
            RuntimeError: the file cannot be read. The message contains the name of the file.
        """
        try:
            yield from self.read(self.files[number])
        except Exception as error:
            raise RuntimeError(f"cannot read {self.files[number]}: {type(error).__name__}: {error}") from error


Pair = tuple[int, int]


def dealt(rests: Sequence[Pair], reader: int, num_readers: int) -> Sequence[Pair]:
    """Return the pieces of ``rests`` that one reader reads.

    An element (piece, used) means that the first ``used`` samples of the piece are already used.
    """
    return rests[reader::num_readers]


def left(rests: Sequence[Pair], reached: Sequence[Pair]) -> list[Pair]:
    """Return the unused parts of ``rests``, which were dealt to ``len(reached)`` readers.

    ``reached`` contains (number, used) of each reader. ``number`` is the position of the reader's current piece among
    the reader's pieces, and ``used`` is the number of samples of the current piece that are used.
    """
    unused = []
    for index, (piece, used) in enumerate(rests):
        number, reader = divmod(index, len(reached))
        if number >= reached[reader][0]:
            unused.append((piece, max(used, reached[reader][1]) if number == reached[reader][0] else used))
    return unused


class _StreamProgress:
    """The pieces at the start of an iteration, and each reader's progress after the last two steps."""

    def __init__(self, position: int, num_pieces: int, rests: Sequence[Pair], num_readers: int) -> None:
        self.num_pieces, self.rests = num_pieces, rests
        # The keys are positions in the epoch. Each value lists (number, used) of all readers.
        self.reached: dict[int, list[Pair]] = {position: [(0, 0)] * num_readers}

    def advance(self, position: int, rows: list[list[int]]) -> int:
        """Store the readers' progress in the step that began at ``position``; return the position after the step."""
        reached = list(self.reached[position])
        for rank, (count, worker, number, used) in enumerate(rows):
            if count > 0:
                reached[worker * len(rows) + rank] = number, used
        after = position + sum(row[0] for row in rows)
        # After a death, the survivors continue after this step or after the previous one.
        self.reached = {position: self.reached[position], after: reached}
        return after

    def state(self, position: int) -> dict[str, Any]:
        """Return the state at ``position``, with the unused part of each piece."""
        rests = torch.tensor(left(self.rests, self.reached[position]), dtype=torch.int64, device="cpu")
        return {"position": position, "num_pieces": self.num_pieces, "rests": rests.reshape(-1, 2)}


# Length of a rank's row in the exchange: number of samples, worker, number of the reader's current piece, and number of
# samples that are used of this piece.
_ROW = 4


class _ReadBatches(IterableDataset[Any]):
    """A dataset of one rank's batches, each with its row for the exchange. Each worker yields its own batches."""

    def __init__(self, iterator: StreamIterator, progress: _StreamProgress) -> None:
        self.iterator, self.progress = iterator, progress

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        info, of = get_worker_info(), self.iterator
        worker = 0 if info is None else info.id
        # Consecutive readers belong to different ranks, so that every rank gets some pieces if there are few.
        rests, samples = dealt(self.progress.rests, worker * of.size + of.rank, of.num_readers), []
        collate = of.collate_fn or default_collate
        for number, (piece, used) in enumerate(rests):
            for count, sample in enumerate(islice(self._piece(piece), used, None), used + 1):
                samples.append(sample)
                if len(samples) == of.batch_size:
                    yield collate(samples), [len(samples), worker, number, count]
                    samples = []
        if samples:
            yield collate(samples), [len(samples), worker, len(rests), 0]

    def _piece(self, piece: int) -> Iterator[Any]:
        stream = self.iterator.stream
        if isinstance(stream, Shards):
            return stream.read_piece(piece)
        return islice(iter(stream), piece, None, self.progress.num_pieces)


class StreamIterator(BatchIterator):
    """An iterator over this rank's batches from a stream. In each epoch, every sample is used once, on one rank.

    Every rank of the level at which the iterator was created must iterate, because the ranks communicate in each step
    (32 bytes per rank). All ranks take the same number of steps. With each batch, the iterator sets ``weight``,
    ``num_samples`` and ``position``, like a ``DatasetIterator``. After ``load_state_dict`` the next iteration begins at
    the saved position, on any number of ranks and workers. Files that were read in part are read again from the
    beginning, and the used samples are skipped.

    A batch is None if this rank has no more samples, but other ranks have some. The engine handles this case. In your
    own loop, pass ``drop_last=True``. Or skip the forward and backward pass (``if batch is not None:``), but still call
    ``optimizer.step()`` of a ``DistributedOptimizer``, because all ranks must join the reduction.

    Args:
        stream (IterableDataset): a ``Shards``, or an IterableDataset that yields all samples of the stream, in the same
            order, in every process. It must not select a part by rank or worker, because each reader iterates over all
            samples and keeps only its own part. If the stream has ``set_epoch``, the iterator calls it.
        batch_size (int): samples per rank, at least 1; the last batch of each reader may be smaller.
        shuffle (bool): True (default) draws the order of the files of ``Shards`` from (seed, epoch). The samples of a
            file keep their order.
        seed (int): seed of the order, the same on every rank; default 0.
        num_workers (int): number of worker processes per rank. New workers start in each epoch, and read and collate
            the samples. Default 0: a thread reads, or the iterating thread if ``prefetch`` is 0.
        multiprocessing_context (str): start method of the processes, as in torch; default None: Python's default.
        prefetch (int): number of batches that each worker builds in advance; default 2.
        device (torch.device or str): device to which batches are moved in advance; default None: not moved.
        collate_fn (callable): function that makes a batch from a list of samples; default None: torch's
            ``default_collate``.
        drop_last (bool): True ends the epoch before the first step in which a rank has no samples, so no batch is None;
            default False.

    Raises:
        TypeError: the stream is not an IterableDataset.
        ValueError: a number is out of range. At the start of an epoch, all ranks raise it if files or options differ
            between ranks.
        RuntimeError: a file of ``Shards`` cannot be read.

    Examples:
        >>> stream = mpi.engine.Shards(range(4), lambda number: [float(number)] * 3)
        >>> iterator = mpi.engine.StreamIterator(stream, batch_size=2)
        >>> total = sum(iterator.num_samples for batch in iterator)  # a batch may be None
        >>> mpi.allreduce(total)
        12
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        multiprocessing_context: Any = None,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size, seed=seed, prefetch=prefetch, device=device, drop_last=drop_last)
        if not isinstance(stream, IterableDataset):
            raise TypeError(f"stream is a {type(stream).__name__}; pass a Shards or another IterableDataset")
        self.stream = stream
        self.shuffle = shuffle and isinstance(stream, Shards)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self.multiprocessing_context = multiprocessing_context
        self.collate_fn = collate_fn
        self._loaded: dict[str, Any] = {}  # state at the start of the next iteration

    @property
    def num_readers(self) -> int:
        """The number of readers: the worker processes of all ranks, or the ranks if there are no workers."""
        return self.size * max(1, self.num_workers)

    @property
    def files(self) -> str | None:
        """A digest of the names of all files, without their folders; None for a stream that is not a ``Shards``."""
        if not isinstance(self.stream, Shards):
            return None
        return digest([os.path.basename(f) if isinstance(f, (str, os.PathLike)) else f for f in self.stream.files])

    def _facts(self) -> dict[str, Any]:
        names = ("files", "batch_size", "shuffle", "seed", "num_workers", "drop_last", "epoch")
        return {name: getattr(self, name) for name in names} | {"position": self._first}

    def _order_facts(self) -> dict[str, Any]:
        return {"files": self.files}

    def set_position(self, position: int) -> None:
        """Choose where the next iteration begins: at the loaded position, at 0, or after one of the last two steps.

        Make the same call on every rank.

        Args:
            position (int): number of samples that the ranks together have used.

        Raises:
            ValueError: the iterator cannot continue at this position.
        """
        progress = self._place.progress
        if progress is not None and self._place.epoch == self.epoch and position in progress.reached:
            self._loaded = progress.state(position)
        if position not in (0, self._loaded.get("position")):
            raise ValueError(f"position={position}: a stream continues only from a saved state; call load_state_dict")
        super().set_position(position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch and the unused part of each piece, as plain data.

        The state is equal on all ranks.
        """
        state = super().state_dict()
        if state["position"] > 0:
            state = (self._loaded if self._is_set else self._place.progress.state(self.position)) | state
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a saved position. Make the same call on every rank.

        Args:
            state (mapping): result of ``state_dict``.

        Raises:
            ValueError: the position is in the middle of an epoch over different files.
        """
        self._loaded = dict(state)
        super().load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        self.check_alike()
        place = self._begin()
        if place.position > 0:
            num_pieces, rests = self._loaded["num_pieces"], self._loaded["rests"].tolist()
        else:
            num_pieces = self._num_pieces(place.epoch)
            draw = np.random.default_rng((self.seed, place.epoch)).permutation if self.shuffle else range
            rests = [(int(piece), 0) for piece in draw(num_pieces)]
        set_epoch(self.stream, place.epoch)
        place.progress = _StreamProgress(place.position, num_pieces, rests, self.num_readers)
        return self._run(place, self._steps(self._read(place), place))

    def _num_pieces(self, epoch: int) -> int:
        number = len(self.stream.files) if isinstance(self.stream, Shards) else self.num_readers
        if number < self.num_readers and self.rank == 0 and epoch == 0:
            text = "there are %d files for %d readers (%d ranks, num_workers=%d), so some readers get no samples; use"
            logger.warning(f"{text} more files", number, self.num_readers, self.size, self.num_workers)
        return number

    def _read(self, place: IterationPlace) -> Generator[tuple[Any, list[int]], None, None]:
        """Return a generator of this rank's batches with their rows. The thread or the workers start in this call."""
        batches = _ReadBatches(self, place.progress)
        if self.num_workers == 0:
            return prefetched(map(self._moved, batches), self.prefetch)
        options = {"batch_size": None, "collate_fn": tuple} | worker_options(self)
        return (self._moved(item) for item in loaded(batches, self._seed_of_workers(place), **options))

    def _moved(self, item: tuple[Any, list[int]]) -> tuple[Any, list[int]]:
        return moved(item[0], self.device), item[1]

    def _steps(
        self, read: Generator[tuple[Any, list[int]], None, None], place: IterationPlace
    ) -> Generator[Any, None, None]:
        with closing(read):
            while True:
                batch, row = next(read, (None, [0] * _ROW))
                # In each step, exchange the numbers of samples, and the piece that each reader has reached.
                rows = [row] if self.size == 1 else verbs.allgather(torch.tensor([row], device="cpu")).tolist()
                counts = [row[0] for row in rows]
                if sum(counts) == 0 or (self.drop_last and min(counts) == 0):
                    return
                place.num_samples = counts[self.rank]
                place.weight = place.num_samples * self.size / sum(counts)
                place.position = place.progress.advance(place.position, rows)
                yield adopted(batch, self.device)
