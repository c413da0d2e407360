"""Each rank's share of a dataset, built ahead of the training loop by a thread.

Vocabulary. A *global batch* is what all ranks together compute on in one step: G = batch_size * size samples, the last
one of an epoch possibly fewer. Epoch e visits the dataset in an *order* drawn from (seed, e), the same on all ranks;
global batch b is ``order[b * G : (b + 1) * G]``, and a rank's *share* of it is one of ``size`` contiguous pieces that
differ by at most one sample.

What follows: every rank takes the same number of steps, whatever the size of the dataset (a rank with one step more
would wait for the others for ever); no sample is dropped (unless asked for), and none is used twice in an epoch; the
global batches depend on G alone, so that 4 ranks of 16 train as 1 rank of 64.

Shares of the last batch may differ, and a plain average over ranks would favour the samples of the small ones. Hence
each batch has a *weight*, num_samples * size / (samples in the global batch): a mean loss scaled by it has gradients
whose average over the ranks is the gradient of the mean over the global batch, exactly. A rank with an empty share gets
one sample to compute on, with weight 0. Layers that need several samples (BatchNorm) want ``drop_last``, which leaves
out an incomplete last global batch: then every share is full.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from torchmpi_py.collectives import verbs
from torchmpi_py.core import agree
from torchmpi_py.engine.batches import BatchIterator, adopted, moved
from torchmpi_py.engine.sources import Source, Sources, at_least, items_of, prefetched, set_epoch


class Share(NamedTuple):
    """Positions ``begin`` to ``end`` of the epoch's order, with their weight in a mean over ranks."""

    begin: int
    end: int
    num_samples: int  # end - begin, or 0 for the stand-in of an empty share
    weight: float


def share(total: int, batch_size: int, batch: int, *, rank: int, size: int) -> Share:
    """The share of ``rank`` in global batch ``batch`` of a dataset of ``total`` samples. Pure arithmetic."""
    first = batch * batch_size * size
    count = min(batch_size * size, total - first)
    begin = first + rank * count // size
    end = first + (rank + 1) * count // size
    if begin == end:
        return Share(first, first + 1, 0, 0.0)
    return Share(begin, end, end - begin, (end - begin) * size / count)


class DatasetIterator(BatchIterator):
    """The batches of this rank, epoch after epoch.

    ``dataset`` has a length and is indexed by integers; a list of datasets (of torch's ``Dataset``, or ``Source``) is
    read as one, each by readers of its own (``sources``). ``batch_size`` is per rank. Iterating runs through one epoch
    and moves on to the next one's order; ``set_epoch`` chooses another (the engine calls it). All ranks must iterate
    alike. ``rank`` and ``size`` default to those of the current communicator, or to 0 of 1 when the package is not
    started. ``prefetch`` batches are built ahead by a thread (0: none, inline), and moved to ``device`` if one is
    given; an error in the dataset surfaces in the loop. A batch is ``collate_fn`` of a list of samples (default:
    torch's), or the indexed tensors of a TensorDataset. ``drop_last`` leaves out the last global batch of an epoch if
    it is incomplete (other samples in each epoch, with ``shuffle``).

    ``sampler``, in place of ``shuffle`` and ``seed``, gives the indices of an epoch, of all ranks: one of torch's, or
    what else has a length and gives integers at each iteration. Its ``set_epoch`` is called if it has one. It must give
    the same on all ranks, which compare digests when an epoch begins: iterating is collective then.

    The thread shares the global random generators (torch's, numpy's, Python's) with the training loop, and who draws
    first is chance. A dataset with random augmentation should draw from a generator of its own, or be given
    ``prefetch=0``; else runs are not reproducible.

    The engine reads ``weight``, ``num_samples`` and ``position`` of each batch. After ``set_position`` or
    ``load_state_dict`` the next iteration begins there, with any number of ranks: no sample is used twice or left out.
    The order of an epoch that was under way in this process is kept then, and the sampler not asked again.
    Raises TypeError for a dataset without length and indexing and for a sampler without length; ValueError for a
    dataset without a batch, an empty source, a number out of range; when an epoch begins, on all ranks: for a sampler
    whose indices differ between ranks, or from those of the loaded state, or are none of the dataset.
    """

    _OF_ITERATION = (*BatchIterator._OF_ITERATION, "_order", "_order_epoch")

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Source | Dataset[Any]],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        sampler: Iterable[int] | None = None,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, prefetch, device, rank, size)
        self.dataset: Any = _as_one(dataset)
        if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}; it must have a length and be indexed by integers (a stream "
                "goes into a StreamIterator)"
            )
        if sampler is not None and not hasattr(sampler, "__len__"):
            raise TypeError(f"sampler is a {type(sampler).__name__}, which lacks a length: give it __len__")
        self.sampler: Any = sampler
        self.shuffle = shuffle and sampler is None
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self._order: torch.Tensor | None = None  # of the epoch under way
        self._order_epoch: int | None = None  # which epoch that is
        self._has_recovered = False  # ranks have died since the last iteration began
        self._loaded_digest: str | None = None
        if len(self.dataset) == 0:
            raise ValueError("the dataset is empty: there is nothing to iterate over")
        if len(self) == 0:
            raise ValueError(
                f"drop_last=True leaves nothing of {self.total} samples: batch_size={batch_size} on {self.size} ranks "
                "is more; take a smaller batch_size"
                if self.drop_last
                else "the sampler is empty: there is nothing to iterate over"
            )

    @property
    def total(self) -> int:
        """Samples in an epoch, over all ranks."""
        return len(self.dataset if self.sampler is None else self.sampler)

    def __len__(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return self._num_batches(self.total)

    def _num_batches(self, num_samples: int) -> int:
        full, rest = divmod(num_samples, self.batch_size * self.size)
        return full + (rest > 0 and not self.drop_last)

    def _facts(self) -> dict[str, Any]:
        names = ("batch_size", "shuffle", "seed", "drop_last")
        facts: dict[str, Any] = {"number of samples": len(self.dataset)} | {name: getattr(self, name) for name in names}
        if isinstance(self.dataset, Sources):
            facts["sizes of sources"] = [len(source.dataset) for source in self.dataset.sources]
        return facts

    def set_position(self, position: int) -> None:
        """As in ``BatchIterator``; ValueError beyond the end of the epoch."""
        if at_least(0, "position", position) > self.total:
            raise ValueError(f"position={position} is beyond the dataset, which has {self.total} samples")
        super().set_position(position)

    def take_place(self) -> None:
        """As in ``BatchIterator``; an epoch that was under way keeps its order."""
        super().take_place()
        self._has_recovered = True

    def state_dict(self) -> dict[str, Any]:
        """As in ``BatchIterator``, with a digest of the order, as far as that is known."""
        order = None if self._used_epoch() is None else self._order
        return super().state_dict() | {"order": self._loaded_digest if order is None else _digest(order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As in ``BatchIterator``; the next iteration raises ValueError if its order is another one."""
        super().load_state_dict(state)
        self._loaded_digest, self._order_epoch = state["order"], None

    def __iter__(self) -> Iterator[Any]:
        under_way, (epoch, first) = self._epoch_under_way, self._begin()
        goes_on = first > 0 or (self._has_recovered and epoch == under_way)
        is_kept, self._has_recovered = goes_on and self._order_epoch == epoch, False

        def draw() -> torch.Tensor:
            if self._order is None or not is_kept:
                self._order, self._order_epoch = self._drawn(epoch), epoch
            return self._order

        # A sampler is not asked again within an epoch: it may have moved on, and this rank may have asked it alone.
        order = self._order = self.order(epoch) if self.sampler is None else self._agreed(draw)
        if first > 0 and self._loaded_digest not in (None, _digest(order)):
            raise ValueError(
                f"the place after {first} samples of epoch {epoch} is in another order than this dataset, seed or "
                "sampler gives now"
            )
        self._loaded_digest = None
        return self._iteration(self._batches(order, first))

    def order(self, epoch: int) -> torch.Tensor:
        """The indices of the dataset in the order of this epoch: a function of (seed, epoch) alone, or the sampler's.

        With a sampler collective; ValueError, on all ranks, for the reasons in the docstring of the class.
        """
        if self.sampler is not None:
            return self._agreed(lambda: self._drawn(epoch))
        if not self.shuffle:
            return torch.arange(self.total, device="cpu")
        return torch.from_numpy(np.random.default_rng((self.seed, epoch)).permutation(self.total))

    def _drawn(self, epoch: int) -> torch.Tensor:
        set_epoch(self.sampler, epoch)
        order = torch.tensor([int(index) for index in self.sampler], dtype=torch.int64, device="cpu")
        beyond = order[(order < 0) | (order >= len(self.dataset))]
        if len(beyond):
            raise ValueError(f"index {int(beyond[0])} is none of a dataset of {len(self.dataset)} samples")
        return order

    def _agreed(self, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The order that ``draw`` returns on all ranks. Collective."""
        orders: list[torch.Tensor] = []

        def draw_digest() -> str:
            orders.append(draw())
            return _digest(orders[0])

        def failed(failures: Mapping[int, str]) -> Exception:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            return ValueError(f"the sampler gives no order: {said}")

        allgather = verbs.allgather_object if self.size > 1 and self.follows_place else agree.alone
        digests = agree.gather_results(allgather, draw_digest, (Exception,), str, failed)
        different = agree.first_different(digests)
        if different is not None:
            raise ValueError(
                f"the sampler gives rank {different} other indices than rank 0; give all ranks the same, of the whole "
                "dataset: seed its generator alike, or draw from (seed, epoch) in set_epoch. The shares of the ranks "
                "are made here"
            )
        return orders[0]

    def _batches(self, order: torch.Tensor, first: int) -> Generator[Any, None, None]:
        total, order = len(order), order[first:]
        num_batches = self._num_batches(len(order))
        shares = [share(len(order), self.batch_size, b, rank=self.rank, size=self.size) for b in range(num_batches)]
        with closing(self._loaded([order[s.begin : s.end] for s in shares])) as batches:
            for number, (mine, batch) in enumerate(zip(shares, batches, strict=True), 1):
                self.weight, self.num_samples = mine.weight, mine.num_samples
                self.position = min(first + number * self.batch_size * self.size, total)
                yield batch
        self._epoch_under_way = None

    def _loaded(self, pieces: list[torch.Tensor]) -> Generator[Any, None, None]:
        """A batch of each of these pieces of the order, in turn."""
        with closing(self._read(pieces)) as read, closing(prefetched(map(self._made, read), self.prefetch)) as batches:
            for batch in batches:
                yield adopted(batch, self.device)

    def _read(self, pieces: list[torch.Tensor]) -> Generator[Any, None, None]:
        """The samples of each piece: a list, or the tensors of a TensorDataset."""
        if isinstance(self.dataset, Sources):
            return self.dataset.read(pieces, self._seed_of_workers())
        return (self._items(piece) for piece in pieces)

    def _items(self, indices: torch.Tensor) -> Any:
        if self._is_of_tensors():
            return tuple(tensor[indices] for tensor in self.dataset.tensors)
        return items_of(self.dataset, indices.tolist())

    def _made(self, items: Any) -> Any:
        return moved(items if self._is_of_tensors() else (self.collate_fn or default_collate)(items), self.device)

    def _is_of_tensors(self) -> bool:
        return type(self.dataset) is TensorDataset and self.collate_fn is None


def _as_one(dataset: Any) -> Any:
    """The dataset; ``Sources`` of a list of datasets. A list of anything else is a dataset itself."""
    is_several = isinstance(dataset, (list, tuple)) and all(isinstance(each, (Source, Dataset)) for each in dataset)
    if is_several and len(dataset) > 0:
        return Sources(dataset)
    return Sources([dataset]) if isinstance(dataset, Source) else dataset


def _digest(order: torch.Tensor) -> str:
    return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()
