"""Streams: samples that come one after the other, without a length or an index, divided over ranks and workers.

Vocabulary. A stream consists of *pieces*: the files of a ``Shards``; of any other IterableDataset every n-th sample,
from the first, the second, ... on, where n is the number of *readers*: worker processes of all ranks, or the ranks. The
pieces of an epoch, in an order drawn from (seed, epoch), are dealt to the readers like cards, and each is read by one
reader alone, from its first sample to its last.

Ranks may have different numbers of samples, which no rank knows before. So in each step the ranks exchange how many
samples they have. A rank that has run out gets None, and its gradients count as zero (torch's Join has the same rule);
the epoch ends when all ranks have run out. The weights are those of ``iterators``: the average of the gradients is the
average over the samples of all ranks.

The exchange also says which piece each reader has reached, and how many samples of it are used. So every rank knows
what is left of the epoch: the pieces that no reader has begun, and the rests of those under way. That is the state,
from which the same ranks go on, or the survivors of a death. A reader that gets the rest of a piece reads the piece
from its begin, and drops the samples that were used.
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
    """A stream of files, each of which is read by one reader alone.

    Args:
        files: A pattern of ``glob``, whose files are taken in the order of their names, or a list of what ``read``
            takes (paths, URLs, ranges of a table).
        read: Returns the samples of one entry, the same ones in the same order each time. It runs in the reader.

    Raises:
        ValueError: There are no files.

    Example:
        ::

            def read(file):
                shard = webdataset.SimpleShardList(file)
                return webdataset.DataPipeline(shard, webdataset.tarfile_to_samples(), webdataset.decode())

            stream = Shards("train-*.tar", read)
    """

    def __init__(self, files: str | Sequence[Any], read: Callable[[Any], Iterable[Any]]) -> None:
        self.files = sorted(glob.glob(files)) if isinstance(files, str) else list(files)
        self.read = read
        if not self.files:
            raise ValueError(f"Shards({files!r}): there is no such file")

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self.files)):
            yield from self.read_piece(number)

    def read_piece(self, number: int) -> Iterator[Any]:
        """The samples of one file. RuntimeError, with the file, if it cannot be read."""
        try:
            yield from self.read(self.files[number])
        except Exception as error:
            raise RuntimeError(f"{self.files[number]}: {type(error).__name__}: {error}") from error


Pair = tuple[int, int]


def dealt(rests: Sequence[Pair], reader: int, num_readers: int) -> Sequence[Pair]:
    """The pieces that are dealt to one of so many readers. Each is (piece, used): its first samples are used."""
    return rests[reader::num_readers]


def left(rests: Sequence[Pair], reached: Sequence[Pair]) -> list[Pair]:
    """The rest of ``rests``, which were dealt to ``len(reached)`` readers.

    Each reader has reached (number, used): a piece, as a number among those dealt to it, and the samples of it that are
    used.
    """
    rest_of = []
    for index, (piece, used) in enumerate(rests):
        number, reader = divmod(index, len(reached))
        if number >= reached[reader][0]:
            rest_of.append((piece, max(used, reached[reader][1]) if number == reached[reader][0] else used))
    return rest_of


class _StreamProgress:
    """The pieces of an epoch, as its iteration began, and what each reader has reached after the last two steps."""

    def __init__(self, position: int, num_pieces: int, rests: Sequence[Pair], num_readers: int) -> None:
        self.num_pieces, self.rests = num_pieces, rests
        self.reached: dict[int, list[Pair]] = {position: [(0, 0)] * num_readers}  # by position

    def advance(self, position: int, rows: list[list[int]]) -> int:
        """Note what the ranks have used in the step that began at ``position``; the position after it."""
        reached = list(self.reached[position])
        for rank, (count, worker, number, used) in enumerate(rows):
            if count > 0:
                reached[worker * len(rows) + rank] = number, used
        after = position + sum(row[0] for row in rows)
        # Survivors of a death go on from here or from the step before.
        self.reached = {position: self.reached[position], after: reached}
        return after

    def state(self, position: int) -> dict[str, Any]:
        """What is left of each piece."""
        rests = torch.tensor(left(self.rests, self.reached[position]), dtype=torch.int64, device="cpu")
        return {"position": position, "num_pieces": self.num_pieces, "rests": rests.reshape(-1, 2)}


_ROW = 4  # numbers that a rank brings to the exchange: samples, worker, and (number, used)


class _ReadBatches(IterableDataset[Any]):
    """The batches of one rank with the rows for the exchange; each DataLoader worker gives those of its reader."""

    def __init__(self, iterator: StreamIterator, progress: _StreamProgress) -> None:
        self.iterator, self.progress = iterator, progress

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        info, of = get_worker_info(), self.iterator
        worker = 0 if info is None else info.id
        # By rank first: where pieces are few, every rank gets some.
        rests, waiting = dealt(self.progress.rests, worker * of.size + of.rank, of.num_readers), []
        collate = of.collate_fn or default_collate
        for number, (piece, used) in enumerate(rests):
            for count, sample in enumerate(islice(self._piece(piece), used, None), used + 1):
                waiting.append(sample)
                if len(waiting) == of.batch_size:
                    yield collate(waiting), [len(waiting), worker, number, count]
                    waiting = []
        if waiting:
            yield collate(waiting), [len(waiting), worker, len(rests), 0]

    def _piece(self, piece: int) -> Iterator[Any]:
        stream = self.iterator.stream
        if isinstance(stream, Shards):
            return stream.read_piece(piece)
        return islice(iter(stream), piece, None, self.progress.num_pieces)


class StreamIterator(BatchIterator):
    """The batches of this rank from a stream, epoch after epoch: every sample once, on one rank.

    Iterating is collective, in every step, over the level at which the iterator was made: an exchange of 32 bytes a
    rank. All ranks take the same number of steps. ``weight``, ``num_samples`` and ``position`` are set with each batch,
    as by a ``DatasetIterator``. After ``load_state_dict`` the next iteration begins at that place, on any number of
    ranks and workers. What was used of the files under way is read again.

    The batch is None where this rank has run out of samples and others have not. The engine knows. A loop of your own
    makes that step without forward and backward pass (``if batch is not None:`` around them; ``optimizer.step()`` of a
    ``DistributedOptimizer`` then takes part in the reduction), or gives ``drop_last=True``.

    Args:
        stream: A ``Shards``, or an IterableDataset that gives the whole stream, the same each time, wherever it is
            iterated (one that takes a part by rank or worker would lose the others): every reader then produces all
            samples, and keeps its own. Its ``set_epoch`` is called if it has one.
        batch_size: Samples per rank; the last batch of each reader may be smaller.
        shuffle: Draw the order of the files of ``Shards`` from (seed, epoch). Samples of a file stay in their order.
        seed: The same on every rank.
        num_workers: Processes that read and collate, started in each epoch; 0: one thread, or none with ``prefetch=0``.
        multiprocessing_context: How processes are started, as in torch.
        prefetch: Batches that are ready ahead, of each worker.
        device: Where batches are moved, ahead of their use.
        collate_fn: Makes a batch of a list of samples (default: torch's).
        drop_last: End the epoch with the first step in which some rank has no batch: no batch is None.

    Raises:
        TypeError: The stream is not an IterableDataset.
        ValueError: A number is out of range. When an epoch begins, on all ranks: the files or numbers differ.
        RuntimeError: A file of ``Shards`` cannot be read.
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
            raise TypeError(f"stream is a {type(stream).__name__}; give a Shards or another IterableDataset")
        self.stream = stream
        self.shuffle = shuffle and isinstance(stream, Shards)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self.multiprocessing_context = multiprocessing_context
        self.collate_fn = collate_fn
        self._loaded: dict[str, Any] = {}  # the state at the place of the next iteration

    @property
    def num_readers(self) -> int:
        """Worker processes of all ranks, or ranks."""
        return self.size * max(1, self.num_workers)

    @property
    def files(self) -> str | None:
        """A digest of the files, without their folders; None for a stream that has none."""
        if not isinstance(self.stream, Shards):
            return None
        return digest([os.path.basename(f) if isinstance(f, (str, os.PathLike)) else f for f in self.stream.files])

    def _facts(self) -> dict[str, Any]:
        names = ("files", "batch_size", "shuffle", "seed", "num_workers", "drop_last", "epoch")
        return {name: getattr(self, name) for name in names} | {"position": self._first}

    def _order_facts(self) -> dict[str, Any]:
        return {"files": self.files}

    def set_position(self, position: int) -> None:
        """Let the next iteration begin at the place of ``load_state_dict``, at 0, or after one of the last two steps.

        ValueError for another place.
        """
        progress = self._place.progress
        if progress is not None and self._place.epoch == self.epoch and position in progress.reached:
            self._loaded = progress.state(position)
        if position not in (0, self._loaded.get("position")):
            raise ValueError(f"position={position}: a stream goes on from a state_dict alone, by load_state_dict")
        super().set_position(position)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch, as plain data that are equal on all ranks: what is left of each piece."""
        state = super().state_dict()
        if state["position"] > 0:
            state = (self._loaded if self._is_set else self._place.progress.state(self.position)) | state
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As in ``BatchIterator``."""
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
            text = "%d files for %d readers (%d ranks, num_workers=%d): some readers, or ranks, have nothing to do"
            logger.warning(text, number, self.num_readers, self.size, self.num_workers)
        return number

    def _read(self, place: IterationPlace) -> Generator[tuple[Any, list[int]], None, None]:
        """This rank's batches with their rows, read ahead. Workers are started here, by the thread that iterates."""
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
                # One exchange a step: it says which ranks have samples, and which piece each reader has reached.
                rows = [row] if self.size == 1 else verbs.allgather(torch.tensor([row], device="cpu")).tolist()
                counts = [row[0] for row in rows]
                if sum(counts) == 0 or (self.drop_last and min(counts) == 0):
                    return
                place.num_samples = counts[self.rank]
                place.weight = place.num_samples * self.size / sum(counts)
                place.position = place.progress.advance(place.position, rows)
                yield adopted(batch, self.device)
