"""Each rank's share of a dataset, built by a thread ahead of the training loop.

Terms. A *global batch* contains the samples of all ranks in one step: G = batch_size * size samples; the last global
batch of an epoch may be smaller. Epoch e visits the dataset in an *order* drawn from (seed, e), the same on all ranks.
Global batch b is ``order[b * G : (b + 1) * G]``. A rank's *share* of it is one of ``size`` contiguous pieces, whose
lengths differ by at most one sample.

This has three consequences. Every rank takes the same number of steps, whatever the size of the dataset; with one step
more, a rank would wait for the others forever. No sample is dropped (unless ``drop_last`` asks for it), and no sample
is used twice in an epoch. The global batches depend only on G, so 4 ranks with batch_size=16 train like 1 rank with
batch_size=64.

The shares of the last batch may have different lengths, so a plain average over ranks would favour the samples of small
shares. Therefore each batch has a *weight*: num_samples * size / (samples in the global batch). If each rank scales its
mean loss by the weight, the average of the gradients over the ranks is exactly the gradient of the mean over the global
batch.

If the last global batch has fewer samples than there are ranks, some shares are empty, and the batch of such a rank is
None. The rank computes nothing in this step, and its gradients count as zero, as in torch's Join. With ``drop_last``,
an incomplete last global batch is omitted, and every share is full.

Alternative: torch's DistributedSampler repeats samples until all shares have the same length. Why not: the repeated
samples count twice, so the result depends on the number of ranks.
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
    """Return the slice of a global batch of ``count`` samples for ``rank``. Lengths differ by at most one."""
    return slice(-(-rank * count // size), -(-(rank + 1) * count // size))


class DatasetIterator(BatchIterator):
    """The batches of this rank, epoch after epoch, from a dataset with a length.

    Each iteration runs through one epoch, and the next iteration uses the next epoch's order. ``set_epoch`` chooses
    another epoch; the engine calls it. All ranks must iterate in the same way. With each batch, ``weight``,
    ``num_samples`` and ``position`` are set. After ``load_state_dict`` the next iteration begins at the saved position:
    the unused samples of the epoch are divided among the present ranks, however many ranks there were before.

    A batch is None if this rank has no samples in a step. This happens only in the last step of an epoch, if the last
    global batch has fewer samples than there are ranks. The engine handles it. Your own loop either passes
    ``drop_last=True``, or skips the forward and backward pass (``if batch is not None:``) but calls
    ``optimizer.step()`` of a ``DistributedOptimizer``, which then takes part in the reduction.

    The prefetching thread shares the global random generators (torch's, numpy's, Python's) with the training loop, and
    their order is random. For reproducible runs, a dataset with random augmentation needs its own generator, or
    ``prefetch=0``.

    Args:
        dataset (Dataset or sequence): object with a length that integers index. A list of datasets (torch's
            ``Dataset``, or ``Source``) is read as one dataset, each by its own readers (see ``sources``).
        batch_size (int): samples per rank, at least 1.
        shuffle (bool): True (default) draws the order of epoch e from (seed, e); False keeps the dataset's order.
        seed (int): seed of the order, the same on every rank; default 0.
        sampler (iterable of int): indices of an epoch, for all ranks, in place of ``shuffle`` and ``seed``; default
            None. It needs a length, and may be a torch sampler. Its ``set_epoch`` is called if it has one. It must give
            the same indices on all ranks. They compare digests at the start of an epoch, so iterating is collective. A
            ``state_dict`` in the middle of an epoch holds the indices.
        prefetch (int): number of batches that a thread builds in advance, or 0 for no thread; default 2. The loop
            raises errors of the dataset.
        device (torch.device or str): device to which batches are moved in advance; default None, not moved.
        collate_fn (callable): function from a list of samples to a batch; default None, torch's. A TensorDataset is
            indexed directly.
        drop_last (bool): True omits an incomplete last global batch; default False.
        rank (int): this rank's number. Pass both ``rank`` and ``size``, or neither; default None, the current level.
        size (int): number of ranks that share the dataset; default None, the current level.

    Raises:
        TypeError: the dataset lacks length or index, or the sampler a length.
        ValueError: the dataset gives no batch, a source is empty, or a number is out of range. At the start of an
            epoch, on all ranks: the sampler's indices differ between ranks, or are not in the dataset.

    Examples:
        >>> data = torch.utils.data.TensorDataset(torch.arange(12.0))
        >>> iterator = mpi.engine.DatasetIterator(data, batch_size=3, shuffle=False)
        >>> number_of_batches = len(iterator)  # 12 / (3 * size()), the same on every rank
        >>> for (x,) in iterator:  # the first epoch; this rank's samples
        ...     assert len(x) == iterator.num_samples
        >>> iterator.position  # samples used by all ranks
        12
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
            raise TypeError(f"dataset is a {name}, without length or index; use a StreamIterator for a stream")
        if sampler is not None and not hasattr(sampler, "__len__"):
            raise TypeError(f"sampler is a {type(sampler).__name__}, which lacks a length; define its __len__")
        self.sampler: Any = sampler
        self.shuffle = shuffle and sampler is None
        self.collate_fn = collate_fn
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")  # indices from the sampler
        self._drawn_for = -1, 0  # epoch and number of ranks for which the indices were drawn
        if len(self) == 0:
            what = f"{self.total} samples, with batch_size={batch_size} on {self.size} ranks, drop_last={drop_last}"
            raise ValueError(f"there is no batch in {what}; use more samples, or a smaller batch_size")

    @property
    def total(self) -> int:
        """The number of samples in an epoch, over all ranks."""
        return len(self.dataset if self.sampler is None else self.sampler)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on every rank."""
        full, rest = divmod(self.total, self.batch_size * self.size)
        return full + (rest > 0 and not self.drop_last)

    def may_give_none(self) -> bool:
        """Return whether a rank may have no samples in the last step of an epoch, or of the rest of an epoch."""
        rests = [(self.total - begin) % (self.batch_size * self.size) for begin in (0, self._first)]
        return not self.drop_last and (any(0 < rest < self.size for rest in rests) or ulfm.is_elastic())

    def _facts(self) -> dict[str, Any]:
        names = ("batch_size", "shuffle", "seed", "drop_last")
        sizes = {"number of samples": len(self.dataset), "sizes of sources": getattr(self.dataset, "sizes", None)}
        return sizes | {name: getattr(self, name) for name in names}

    def _order_facts(self) -> dict[str, Any]:
        return {"samples": self.total, "seed": self.seed, "shuffle": self.shuffle}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch. In the middle of an epoch it includes the sampler's indices."""
        state = super().state_dict()
        has_drawn = self.sampler is not None and state["position"] > 0
        return state | {"indices": self._order if has_drawn else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a saved position. Make the same call on every rank.

        Args:
            state (mapping): result of ``state_dict``.

        Raises:
            ValueError: the position is in the middle of an epoch that has a different order.
        """
        super().load_state_dict(state)
        if self._first > 0 and state["indices"] is not None:
            self._order, self._drawn_for = state["indices"], (self.epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        place = self._begin()
        return self._run(place, self._batches(self.order(place.epoch)[place.position :], place))

    def order(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch, in order; they depend only on (seed, epoch), or come from the sampler.

        With a sampler, every rank must make this call.

        Args:
            epoch (int): number of the epoch.

        Returns:
            A tensor of int64 on the CPU, with the indices of all ranks.

        Raises:
            ValueError: on all ranks, if the sampler's indices differ between ranks, or are not in the dataset.
        """
        if self.sampler is not None:
            return self._of_sampler(epoch)
        if not self.shuffle:
            return torch.arange(self.total, device="cpu")
        return torch.from_numpy(np.random.default_rng((self.seed, epoch)).permutation(self.total))

    def _of_sampler(self, epoch: int) -> torch.Tensor:
        """Return the sampler's order, the same on all ranks. Collective."""
        # For the rest of an epoch, after a death or a resume, keep the indices: the sampler may return others now.
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
        """Yield one batch for each of these pieces of the order."""
        read = self._read(pieces, seed)
        with closing(read), closing(prefetched(map(self._batch, read), self.prefetch)) as batches:
            for batch in batches:
                yield adopted(batch, self.device)

    def _read(self, pieces: list[torch.Tensor], seed: int) -> Generator[Any, None, None]:
        """Return the samples of each piece: a list, or the tensors of a TensorDataset."""
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
    """Return the dataset, or ``Sources`` for a list of datasets. A list of other objects is itself a dataset."""
    is_several = isinstance(dataset, (list, tuple)) and all(isinstance(each, (Source, Dataset)) for each in dataset)
    if is_several and len(dataset) > 0:
        return Sources(dataset)
    return Sources([dataset]) if isinstance(dataset, Source) else dataset
