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
whose average over the ranks is the gradient of the mean over the global batch, exactly. If the last global batch has
fewer samples than there are ranks, a rank's share is empty, and its batch is None: the rank computes nothing in this
step, and its gradients count as zero, as in torch's Join. ``drop_last`` leaves out an incomplete last global batch:
then every share is full.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from torchmpi_py.collectives import verbs
from torchmpi_py.core import ulfm
from torchmpi_py.engine.batches import BatchIterator, IterationPlace, adopted, check_equal, moved
from torchmpi_py.engine.sources import Source, Sources, items_of, prefetched, set_epoch


def share(count: int, rank: int, size: int) -> slice:
    """The share of ``rank`` in a global batch of ``count`` samples. Shares differ by at most one; rank 0 has most."""
    return slice(-(-rank * count // size), -(-(rank + 1) * count // size))


class DatasetIterator(BatchIterator):
    """The batches of this rank, epoch after epoch.

    Iterating runs through one epoch and moves on to the next one's order; ``set_epoch`` chooses another (the engine
    calls it). All ranks iterate in the same way. The engine reads ``weight``, ``num_samples`` and ``position`` of each
    batch. After ``load_state_dict`` the next iteration begins at that place: the samples of the epoch that were not
    used are divided among the present ranks, however many there were before.

    A batch is None where this rank has no samples in a step: only in the last step of an epoch, if the last global
    batch has fewer samples than there are ranks. The engine knows. A loop of your own makes that step without forward
    and backward pass (``if batch is not None:`` around them; ``optimizer.step()`` of a ``DistributedOptimizer`` then
    takes part in the reduction), or gives ``drop_last=True``, with which no batch is None.

    The thread shares the global random generators (torch's, numpy's, Python's) with the training loop, and who draws
    first is chance. A dataset with random augmentation should draw from a generator of its own, or be given
    ``prefetch=0``; else runs are not reproducible.

    Args:
        dataset: It has a length and is indexed by integers. A list of datasets (of torch's ``Dataset``, or ``Source``)
            is read as one, each by readers of its own (``sources``).
        batch_size: Samples per rank.
        shuffle: Draw the order of epoch e from (seed, e).
        seed: The same on every rank.
        sampler: In place of ``shuffle`` and ``seed``: gives the indices of an epoch, of all ranks. One of torch's, or
            what else has a length and gives integers at each iteration. Its ``set_epoch`` is called if it has one. It
            must give the same on all ranks, which compare digests when an epoch begins: iterating is collective then.
            A ``state_dict`` in the middle of an epoch holds its indices.
        prefetch: Batches that a thread builds ahead; 0: none, inline. An error in the dataset is raised in the loop.
        device: Where batches are moved, ahead of their use.
        collate_fn: Makes a batch of a list of samples (default: torch's; of a TensorDataset, the indexed tensors).
        drop_last: Leave out the last global batch of an epoch if it is incomplete (other samples in each epoch, with
            ``shuffle``).
        rank: This rank's number. Give both ``rank`` and ``size``, or neither: the default is the current communicator.
        size: The number of ranks that share the dataset.

    Raises:
        TypeError: The dataset lacks length or index, or the sampler a length.
        ValueError: The dataset has no batch, a source is empty, or a number is out of range. When an epoch begins, on
            all ranks: the sampler's indices differ between ranks, or are not in the dataset.
    """

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
        place = rank, size
        super().__init__(batch_size, seed=seed, prefetch=prefetch, device=device, drop_last=drop_last, place=place)
        self.dataset: Any = _as_one(dataset)
        if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")):
            name = type(dataset).__name__
            raise TypeError(f"dataset is a {name}, without length or index; a stream goes into a StreamIterator")
        if sampler is not None and not hasattr(sampler, "__len__"):
            raise TypeError(f"sampler is a {type(sampler).__name__}, which lacks a length: give it __len__")
        self.sampler: Any = sampler
        self.shuffle = shuffle and sampler is None
        self.collate_fn = collate_fn
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")  # of the sampler
        self._drawn_for = -1, 0  # the epoch and the number of ranks for which it was drawn
        if len(self) == 0:
            what = f"{self.total} samples, with batch_size={batch_size} on {self.size} ranks, drop_last={drop_last}"
            raise ValueError(f"there is no batch in {what}: give more samples, or a smaller batch_size")

    @property
    def total(self) -> int:
        """Samples in an epoch, over all ranks."""
        return len(self.dataset if self.sampler is None else self.sampler)

    def __len__(self) -> int:
        """Batches in an epoch, the same on every rank."""
        full, rest = divmod(self.total, self.batch_size * self.size)
        return full + (rest > 0 and not self.drop_last)

    def may_give_none(self) -> bool:
        """Whether a rank may have no samples in the last step: of an epoch, or of a rest that other ranks have left."""
        rests = [(self.total - begin) % (self.batch_size * self.size) for begin in (0, self._first)]
        return not self.drop_last and (any(0 < rest < self.size for rest in rests) or ulfm.is_elastic())

    def _facts(self) -> dict[str, Any]:
        names = ("batch_size", "shuffle", "seed", "drop_last")
        sizes = {"number of samples": len(self.dataset), "sizes of sources": getattr(self.dataset, "sizes", None)}
        return sizes | {name: getattr(self, name) for name in names}

    def _order_facts(self) -> dict[str, Any]:
        return {"samples": self.total, "seed": self.seed, "shuffle": self.shuffle}

    def state_dict(self) -> dict[str, Any]:
        """As in ``BatchIterator``; in the middle of an epoch with the sampler's order, which it may not give again."""
        state = super().state_dict()
        has_drawn = self.sampler is not None and state["position"] > 0
        return state | {"indices": self._order if has_drawn else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As in ``BatchIterator``."""
        super().load_state_dict(state)
        if self._first > 0 and state["indices"] is not None:
            self._order, self._drawn_for = state["indices"], (self.epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        place = self._begin()
        return self._run(place, self._batches(self.order(place.epoch)[place.position :], place))

    def order(self, epoch: int) -> torch.Tensor:
        """The indices of the dataset in the order of this epoch: a function of (seed, epoch) alone, or the sampler's.

        With a sampler collective; ValueError, on all ranks, for the reasons in the docstring of the class.
        """
        if self.sampler is not None:
            return self._of_sampler(epoch)
        if not self.shuffle:
            return torch.arange(self.total, device="cpu")
        return torch.from_numpy(np.random.default_rng((self.seed, epoch)).permutation(self.total))

    def _of_sampler(self, epoch: int) -> torch.Tensor:
        """The sampler's order, the same on all ranks. Collective."""
        # In the rest of an epoch, after a death or a resume, the sampler is not asked again: it may have moved on.
        if self._drawn_for[0] != epoch or self._drawn_for[1] == self.size:
            set_epoch(self.sampler, epoch)
            self._order = torch.tensor([int(index) for index in self.sampler], dtype=torch.int64, device="cpu")
            self._drawn_for = epoch, self.size
        if self.size > 1 and self.follows_place:
            digest = hashlib.blake2b(self._order.numpy().tobytes(), digest_size=8).hexdigest()
            what = "samplers, of whose indices the iterator gives each rank a share,"
            check_equal(what, verbs.allgather_object({f"the digest of epoch {epoch}": digest}))
        outside = self._order[(self._order < 0) | (self._order >= len(self.dataset))]
        if len(outside):
            raise ValueError(f"index {int(outside[0])} is not in a dataset of {len(self.dataset)} samples")
        return self._order

    def _batches(self, order: torch.Tensor, place: IterationPlace) -> Generator[Any, None, None]:
        most = self.batch_size * self.size
        batches = [batch for batch in torch.split(order, most) if len(batch) >= (most if self.drop_last else 1)]
        shares = [batch[share(len(batch), self.rank, self.size)] for batch in batches]
        with closing(self._loaded([piece for piece in shares if len(piece)], self._seed_of_workers(place))) as loaded:
            for batch, piece in zip(batches, shares, strict=True):
                sample = next(loaded) if len(piece) else None
                place.num_samples, place.weight = len(piece), len(piece) * self.size / len(batch)
                place.position += len(batch)
                yield sample

    def _loaded(self, pieces: list[torch.Tensor], seed: int) -> Generator[Any, None, None]:
        """A batch of each of these pieces of the order, in turn."""
        read = self._read(pieces, seed)
        with closing(read), closing(prefetched(map(self._batch, read), self.prefetch)) as batches:
            for batch in batches:
                yield adopted(batch, self.device)

    def _read(self, pieces: list[torch.Tensor], seed: int) -> Generator[Any, None, None]:
        """The samples of each piece: a list, or the tensors of a TensorDataset."""
        if isinstance(self.dataset, Sources):
            return self.dataset.read(pieces, seed)
        if self._is_of_tensors():
            return (tuple(tensor[piece] for tensor in self.dataset.tensors) for piece in pieces)
        return (items_of(self.dataset, piece.tolist()) for piece in pieces)

    def _batch(self, items: Any) -> Any:
        return moved(items if self._is_of_tensors() else (self.collate_fn or default_collate)(items), self.device)

    def _is_of_tensors(self) -> bool:
        return type(self.dataset) is TensorDataset and self.collate_fn is None


def _as_one(dataset: Any) -> Any:
    """The dataset; ``Sources`` of a list of datasets. A list of anything else is a dataset itself."""
    is_several = isinstance(dataset, (list, tuple)) and all(isinstance(each, (Source, Dataset)) for each in dataset)
    if is_several and len(dataset) > 0:
        return Sources(dataset)
    return Sources([dataset]) if isinstance(dataset, Source) else dataset
