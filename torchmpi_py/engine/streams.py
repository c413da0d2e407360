"""Streams: samples that come one after the other, without a length or an index, divided over ranks and workers.

Vocabulary. A stream consists of *pieces*: the files of a ``Shards``; of any other IterableDataset every n-th sample,
from the first, the second, ... on, where n is the number of *readers*: worker processes of all ranks, or the ranks. The
pieces of an epoch, in an order drawn from (seed, epoch), are dealt to the readers like cards, and each is read by one
reader alone, from its first sample to its last.

Ranks may have different numbers of samples, which nobody knows before. So in each step the ranks exchange how many
samples they have; a rank that has run out computes on a stand-in of weight 0, and the epoch ends when all have run out.
The weights are those of ``iterators``: the average of the gradients is that over the samples of all ranks.

What the ranks exchange also says which piece each reader has come to, and how many samples of it are used. So every
rank knows what is left of the epoch: the pieces nobody has begun, and the rests of those under way. That is the state,
which any number of readers can share out again. A reader that gets the rest of a piece reads the piece from its begin,
and drops the samples that were used.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from torchmpi_py.collectives import verbs
from torchmpi_py.engine.batches import BatchIterator, adopted, moved
from torchmpi_py.engine.sources import at_least, begun, prefetched, set_epoch

logger = logging.getLogger("torchmpi_py")


def read_tar(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The samples of a tar file, possibly compressed: {"__key__": "a/0001", "jpg": bytes, "cls": bytes}.

    A sample is made of consecutive files with the same name up to the first dot behind the last slash; what follows
    that dot is the key of their content (webdataset's convention). ValueError for the same name twice in a sample.
    """
    sample: dict[str, Any] = {}
    with tarfile.open(path, "r|*") as archive:
        if archive.offset == 0:  # empty, which tarfile of Python 3.10 must not be asked again
            return
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # tarfile keeps all headers that it has read
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            folder, name = os.path.split(member.name)
            stem, _, extension = name.partition(".")
            key = os.path.join(folder, stem)
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            if extension in sample:
                raise ValueError(f"{member.name} occurs twice in one sample")
            sample |= {"__key__": key, extension: content.read()}
    if sample:
        yield sample


class Shards(IterableDataset[Any]):
    """A stream of files, each of which is a piece: ``Shards("train-*.tar")``.

    files: a pattern of ``glob``, whose files are taken in the order of their names, or a list; ``read`` may take other
    entries than paths (URLs, ranges of a table). read: a function from an entry to its samples, the same ones in the
    same order each time it is called; it runs in the reader. The default gives the samples of a tar file as bytes
    (``read_tar``); a function of your own decodes them. ValueError if there are no files.
    """

    def __init__(self, files: str | Sequence[Any], read: Callable[[Any], Iterable[Any]] = read_tar) -> None:
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


class Rest(NamedTuple):
    """A piece of which the first ``used`` samples are used."""

    piece: int
    used: int


class Reached(NamedTuple):
    """The piece that a reader is in, as a number among those dealt to it, and how many samples of it are used."""

    number: int
    used: int


def dealt(rests: Sequence[Rest], reader: int, num_readers: int) -> Sequence[Rest]:
    """The pieces that are dealt to one of so many readers."""
    return rests[reader::num_readers]


def left(rests: Sequence[Rest], reached: Sequence[Reached]) -> list[Rest]:
    """The rest of ``rests``, which were dealt to ``len(reached)`` readers that have come so far."""
    kept = []
    for index, rest in enumerate(rests):
        number, reader = divmod(index, len(reached))
        if number == reached[reader].number:
            kept.append(Rest(rest.piece, max(rest.used, reached[reader].used)))
        elif number > reached[reader].number:
            kept.append(rest)
    return kept


_ROW = 4  # numbers that a rank brings to the exchange: samples, worker, Reached
_OVER, _FAILED = 0, -1  # in place of a number of samples


class _ReadBatches(IterableDataset[Any]):
    """The batches of one rank with the rows for the exchange; each DataLoader worker gives those of its reader."""

    def __init__(self, iterator: StreamIterator, rests: Sequence[Rest], num_pieces: int) -> None:
        self.stream, self.num_pieces = iterator.stream, num_pieces
        self.batch_size, self.collate = iterator.batch_size, iterator.collate_fn or default_collate
        # By rank first: where pieces are few, every rank gets some.
        self.dealt_to = [
            dealt(rests, worker * iterator.size + iterator.rank, iterator.num_readers)
            for worker in range(max(1, iterator.num_workers))
        ]

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        mine, held = self.dealt_to[worker], []
        for number, (piece, used) in enumerate(mine):
            for count, sample in enumerate(islice(self._piece(piece), used, None), used + 1):
                held.append(sample)
                if len(held) == self.batch_size:
                    yield self.collate(held), [len(held), worker, number, count]
                    held = []
        if held:
            yield self.collate(held), [len(held), worker, len(mine), 0]

    def _piece(self, piece: int) -> Iterator[Any]:
        if isinstance(self.stream, Shards):
            return self.stream.read_piece(piece)
        return islice(iter(self.stream), piece, None, self.num_pieces)


class StreamIterator(BatchIterator):
    """The batches of this rank from a stream, epoch after epoch: every sample once, on one rank.

    stream: a ``Shards``; or an IterableDataset that gives the whole stream, the same each time, wherever it is iterated
    (one that takes a part by rank or worker would lose the others): every reader then produces all samples, and keeps
    its own. Its ``set_epoch`` is called if it has one. batch_size: per rank; the last batch of each reader may be
    smaller. shuffle: the order of the files of ``Shards`` is drawn from (seed, epoch); samples of a file stay in their
    order. num_workers: processes that read and collate, started in each epoch as ``multiprocessing_context`` says; 0:
    one thread, or none with ``prefetch=0``. prefetch: batches that are ready ahead, of each worker.

    Iterating is collective, in every step, over the level at which the iterator was made: an exchange of 32 bytes a
    rank. All ranks take the same number of steps. ``weight``, ``num_samples`` and ``position`` are set with each batch,
    as by a ``DatasetIterator``. After ``load_state_dict`` the next iteration begins at that place, with any number of
    ranks and workers: no sample is used twice or left out. What was used of the files under way is read again.

    Raises TypeError for anything but an IterableDataset, ValueError for numbers out of range; when an epoch begins
    ValueError, on all ranks, if their streams or numbers differ; RuntimeError, on all ranks, if the stream raises on
    one.
    """

    _OF_ITERATION = (*BatchIterator._OF_ITERATION, "_num_pieces", "_rests", "_reached")

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
    ) -> None:
        super().__init__(batch_size, seed, prefetch, device)
        if not isinstance(stream, IterableDataset):
            raise TypeError(f"stream is a {type(stream).__name__}; give a Shards or another IterableDataset")
        self.stream = stream
        self.shuffle = shuffle and isinstance(stream, Shards)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self.multiprocessing_context = multiprocessing_context
        self.collate_fn = collate_fn
        self._num_pieces = 0  # of the epoch under way
        self._rests: Sequence[Rest] = ()  # of the epoch, as the iteration began
        self._reached: dict[int, list[Reached]] = {}  # by position: after the last two steps; of each reader
        self._loaded: Mapping[str, Any] | None = None

    @property
    def num_readers(self) -> int:
        """Worker processes of all ranks, or ranks."""
        return self.size * max(1, self.num_workers)

    @property
    def files(self) -> str | None:
        """A digest of the files, without their folders; None for a stream that has none."""
        if not isinstance(self.stream, Shards):
            return None
        names = [os.path.basename(f) if isinstance(f, (str, os.PathLike)) else repr(f) for f in self.stream.files]
        return hashlib.blake2b("\n".join(names).encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def _facts(self) -> dict[str, Any]:
        names = ("files", "batch_size", "shuffle", "seed", "num_workers", "epoch")
        number = len(self.stream.files) if isinstance(self.stream, Shards) else None
        facts = {"number of files": number} | {name: getattr(self, name) for name in names}
        return facts | {"position": self._first}

    def set_position(self, position: int) -> None:
        """Let the next iteration begin at the place of ``load_state_dict``, at 0, or after one of the last two steps.

        ValueError for another place.
        """
        if self._epoch_under_way == self.epoch and position in self._reached:
            self._loaded = self._state(position)
        if position not in (0, self._loaded["position"] if self._loaded else 0):
            raise ValueError(
                f"position={position}: a stream goes on from a state alone, which says what is used of each file: give "
                "load_state_dict the state_dict of that place"
            )
        super().set_position(position)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch, as plain data that are equal on all ranks: what is left of each piece."""
        if self._used_epoch() is not None and self.position > 0:
            return self._state(self.position)
        return dict(self._loaded) if self._first > 0 and self._loaded else super().state_dict() | {"files": self.files}

    def _state(self, position: int) -> dict[str, Any]:
        rests = torch.tensor(left(self._rests, self._reached[position]), dtype=torch.int64, device="cpu")
        place = {"epoch": self._epoch_under_way, "position": position, "num_pieces": self._num_pieces}
        return place | {"files": self.files, "rests": rests.reshape(-1, 2)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As in ``BatchIterator``; ValueError if the state is of other files."""
        if state["files"] != self.files:
            raise ValueError("the state is of a stream of other files")
        self._loaded = state
        super().load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        self.check_alike()
        epoch, first = self._begin()
        if first > 0:
            assert self._loaded is not None, "without one a position is refused"
            self._num_pieces = self._loaded["num_pieces"]
            self._rests = [Rest(*pair) for pair in self._loaded["rests"].tolist()]
        else:
            self._rests = [Rest(piece, 0) for piece in self._whole(epoch)]
        self._loaded = None
        self._reached = {first: [Reached(0, 0)] * self.num_readers}
        set_epoch(self.stream, epoch)
        return self._iteration(self._steps(self._read()))

    def _whole(self, epoch: int) -> list[int]:
        self._num_pieces = len(self.stream.files) if isinstance(self.stream, Shards) else self.num_readers
        if self._num_pieces < self.num_readers and self.rank == 0 and epoch == 0:
            text = "%d files for %d readers (%d ranks, num_workers=%d): some readers, or ranks, have nothing to do"
            logger.warning(text, self._num_pieces, self.num_readers, self.size, self.num_workers)
        if not self.shuffle:
            return list(range(self._num_pieces))
        order: list[int] = np.random.default_rng((self.seed, epoch)).permutation(self._num_pieces).tolist()
        return order

    def _read(self) -> Generator[tuple[Any, list[int]], None, None]:
        """This rank's batches with their rows, read ahead. Workers are started here, by the thread that iterates."""
        batches = _ReadBatches(self, self._rests, self._num_pieces)
        if self.num_workers == 0:
            return prefetched(map(self._moved, batches), self.prefetch)
        loader = DataLoader(
            batches,
            batch_size=None,
            collate_fn=_same,
            num_workers=self.num_workers,
            prefetch_factor=max(1, self.prefetch),
            multiprocessing_context=self.multiprocessing_context,
            generator=torch.Generator().manual_seed(self._seed_of_workers()),
        )
        return (self._moved(item) for item in begun(loader))

    def _moved(self, item: tuple[Any, list[int]]) -> tuple[Any, list[int]]:
        return moved(item[0], self.device), item[1]

    def _steps(self, read: Generator[tuple[Any, list[int]], None, None]) -> Generator[Any, None, None]:
        spare = None  # this rank's first batch; of a rank that has none another rank's
        with closing(read):
            while True:
                # A rank that has run out goes on with the others, on a stand-in of weight 0, until all have.
                batch, rows = self._exchanged(read)
                counts = [row[0] for row in rows]
                if sum(counts) == 0:
                    break
                if spare is None:
                    spare = _copied(self._first_batch(batch, counts))
                self.num_samples = counts[self.rank]
                self.weight = self.num_samples * self.size / sum(counts)
                self._count(rows)
                yield adopted(_copied(spare) if batch is None else batch, self.device)
        self._epoch_under_way = None

    def _exchanged(self, read: Iterator[tuple[Any, list[int]]]) -> tuple[Any, list[list[int]]]:
        """This rank's next batch, or None, and the rows of all ranks. RuntimeError, on all ranks, if one fails."""
        batch, row, error = None, [_OVER] * _ROW, None
        try:
            batch, row = next(read, (batch, row))
        except Exception as raised:
            row, error = [_FAILED] * _ROW, raised
        # One exchange a step: it says who has samples, who has failed, and what each reader has come to.
        rows = [row] if self.size == 1 else verbs.allgather(torch.tensor([row], device="cpu")).tolist()
        if any(row[0] == _FAILED for row in rows):
            mine = None if error is None else f"{type(error).__name__}: {error}"
            said = [mine] if self.size == 1 else verbs.allgather_object(mine)
            text = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(said) if each is not None)
            raise RuntimeError(f"the stream cannot be read: {text}") from error
        return batch, rows

    def _count(self, rows: list[list[int]]) -> None:
        before, reached = self.position, list(self._reached[self.position])
        for rank, (count, worker, number, used) in enumerate(rows):
            self.position += count
            if count > 0:
                reached[worker * self.size + rank] = Reached(number, used)
        # Survivors of a death go on from here or from the step before.
        self._reached = {before: self._reached[before], self.position: reached}

    def _first_batch(self, batch: Any, counts: Sequence[int]) -> Any:
        """The batch; for ranks without one that of the lowest rank that has one. Collective if there are such ranks."""
        if min(counts) > 0:
            return batch
        root = next(rank for rank, count in enumerate(counts) if count > 0)
        mine = tree_map_only(torch.Tensor, torch.Tensor.cpu, batch) if self.rank == root else None
        given = verbs.broadcast_object(mine, root)
        return moved(given, self.device) if batch is None else batch


def _copied(batch: Any) -> Any:
    """A batch that the training loop may change in place."""
    return tree_map_only(torch.Tensor, torch.clone, batch)


def _same(item: Any) -> Any:
    """In place of DataLoader's conversion: a batch is complete."""
    return item
