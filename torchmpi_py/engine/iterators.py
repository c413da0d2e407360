"""Each rank's share of a dataset. A thread builds the batches ahead of the training loop.

Terms. A *global batch* contains the samples of all ranks in one step: G = batch_size * size samples; the last global
batch of an epoch may be smaller. Epoch e visits the dataset in an *order* that is drawn from (seed, e) and equal on all
ranks. Global batch b is ``order[b * G : (b + 1) * G]``. It is divided into ``size`` contiguous pieces, whose lengths
differ by at most one sample. Each rank has one piece as its *share*.

This has three consequences. Every rank takes the same number of steps, whatever the size of the dataset, so no rank
waits forever for ranks that have no more steps. No sample is dropped (except with ``drop_last``), and no sample is used
twice in an epoch. The global batches depend only on G, so 4 ranks with batch_size=16 train like 1 rank with
batch_size=64.

The shares of the last batch may have different lengths, so a plain average over ranks would favour the samples of small
shares. Therefore each batch has a *weight*: num_samples * size / (samples in the global batch). If each rank scales its
mean loss by the weight, the average of the gradients over the ranks is exactly the gradient of the mean loss of the
global batch.

If the last global batch has fewer samples than there are ranks, some shares are empty. A rank with an empty share gets
None as its batch. It computes nothing in this step, and its gradients count as zero, as in torch's Join. With
``drop_last``, an incomplete last global batch is omitted, and every share is full.

Alternative: repeat samples until all shares have the same length, like torch's DistributedSampler. Why not: the
repeated samples count twice, so the result depends on the number of ranks.
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
    """Return the slice of ``rank`` in a global batch of ``count`` samples. Slice lengths differ by at most one."""
    return slice(-(-rank * count // size), -(-(rank + 1) * count // size))


class DatasetIterator(BatchIterator):
    """An iterator over this rank's batches from a dataset with a length.

    Each iteration is one epoch, and the next iteration uses the order of the next epoch. ``set_epoch`` chooses another
    epoch; the engine calls it before each epoch. All ranks must iterate over the same epochs. With each batch, the
    iterator sets ``weight``, ``num_samples`` and ``position``. After ``load_state_dict`` the next iteration begins at
    the saved position. The unused samples of the epoch are divided among the current ranks, whatever the number of
    ranks was before.

    A batch is None if this rank has no samples in a step. This happens only in the last step of an epoch, if the last
    global batch has fewer samples than there are ranks. The engine handles this case. In your own loop, pass
    ``drop_last=True``. Or skip the forward and backward pass (``if batch is not None:``), but still call
    ``optimizer.step()`` of a ``DistributedOptimizer``, because all ranks must join the reduction.

    The prefetching thread and the training loop share the global random generators (torch's, numpy's, Python's), and
    draw from these generators in an unpredictable order. For reproducible runs, a dataset with random augmentation
    needs its own generator, or ``prefetch=0``.

    Args:
        dataset (Dataset or sequence): object with a length and an integer index. A list of datasets (torch's
            ``Dataset``, or ``Source``) counts as one dataset, and each of them has its own readers (see ``sources``).
        batch_size (int): samples per rank, at least 1.
        shuffle (bool): True (default) draws the order of epoch e from (seed, e); False keeps the dataset's order.
        seed (int): seed of the order, the same on every rank; default 0.
        sampler (iterable of int): indices of an epoch for all ranks, instead of ``shuffle`` and ``seed``; default None.
            The sampler needs a length, and may be a torch sampler. If it has ``set_epoch``, the iterator calls it. The
            indices must be equal on all ranks. The ranks compare digests of them at the start of each epoch, so every
            rank must iterate. In the middle of an epoch, ``state_dict`` contains the indices.
        prefetch (int): number of batches that a thread builds in advance, or 0 for no thread; default 2. Errors of the
            dataset are raised in the loop.
        device (torch.device or str): device to which batches are moved in advance; default None: not moved.
        collate_fn (callable): function that makes a batch from a list of samples; default None: torch's
            ``default_collate``, or direct indexing of a TensorDataset.
        drop_last (bool): True omits an incomplete last global batch; default False.
        rank (int): this rank's number; default None: the rank in the current level. Pass both ``rank`` and ``size``, or
            neither.
        size (int): number of ranks that share the dataset; default None: the size of the current level.

    Raises:
        TypeError: the dataset has no length or no index, or the sampler has no length.
        ValueError: there is no batch, a source is empty, or a number is out of range. At the start of an epoch, all
            ranks raise it if the sampler's indices differ between ranks, or are out of range.

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
            raise TypeError(f"dataset is a {name}; define its __len__ and __getitem__, or use a StreamIterator")
        if sampler is not None and not hasattr(sampler, "__len__"):
            raise TypeError(f"sampler is a {type(sampler).__name__}, which has no length; define its __len__")
        self.sampler: Any = sampler
        self.shuffle = shuffle and sampler is None
        self.collate_fn = collate_fn
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")  # indices from the sampler
        self._drawn_for = -1, 0  # epoch and number of ranks for which the indices were drawn
        if len(self) == 0:
            what = f"{self.total} samples (batch_size={batch_size}, drop_last={drop_last}, ranks: {self.size})"
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
        """Return whether a rank may have no samples in the last step of an epoch, or of the rest of an epoch.

        In an elastic job this may happen in any epoch without ``drop_last``, because a death changes the number of
        ranks.
        """
        rests = [(self.total - begin) % (self.batch_size * self.size) for begin in (0, self._first)]
        return not self.drop_last and (any(0 < rest < self.size for rest in rests) or ulfm.is_elastic())

    def _facts(self) -> dict[str, Any]:
        names = ("batch_size", "shuffle", "seed", "drop_last")
        sizes = {"number of samples": len(self.dataset), "sizes of sources": getattr(self.dataset, "sizes", None)}
        return sizes | {name: getattr(self, name) for name in names}

    def _order_facts(self) -> dict[str, Any]:
        return {"samples": self.total, "seed": self.seed, "shuffle": self.shuffle}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, and the sampler's indices in the middle of an epoch."""
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
        """Return the indices of an epoch, in order. The order depends only on (seed, epoch), or on the sampler.

        With a sampler, every rank must make this call.

        Args:
            epoch (int): number of the epoch.

        Returns:
            A tensor of int64 on the CPU, with the indices of all ranks.

        Raises:
            ValueError: the sampler's indices differ between ranks, or are out of range. All ranks raise the error.
        """
        if self.sampler is not None:
            return self._of_sampler(epoch)
        if not self.shuffle:
            return torch.arange(self.total, device="cpu")
        return torch.from_numpy(np.random.default_rng((self.seed, epoch)).permutation(self.total))

    def _of_sampler(self, epoch: int) -> torch.Tensor:
        """Return the sampler's indices, and check that they are equal on all ranks. Every rank must make this call."""
        # For the rest of an epoch, after a death or a resume, keep the indices, because the sampler may return
        # different indices now.
        if self._drawn_for[0] != epoch or self._drawn_for[1] == self.size:
            set_epoch(self.sampler, epoch)
            self._order = torch.tensor([int(index) for index in self.sampler], dtype=torch.int64, device="cpu")
            self._drawn_for = epoch, self.size
        if self.size > 1 and self.follows_place:
            digest = hashlib.blake2b(self._order.numpy().tobytes(), digest_size=8).hexdigest()
            name = f"the digest of the indices of epoch {epoch}"
            check_equal("samplers", verbs.allgather_object({name: digest}))
        outside = self._order[(self._order < 0) | (self._order >= len(self.dataset))]
        if len(outside):
            raise ValueError(f"sampler: index {int(outside[0])} is out of range; use 0 to {len(self.dataset) - 1}")
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
        """Yield one batch for each piece of the order."""
        read = self._read(pieces, seed)
        with closing(read), closing(prefetched(map(self._batch, read), self.prefetch)) as batches:
            for batch in batches:
                yield adopted(batch, self.device)

    def _read(self, pieces: list[torch.Tensor], seed: int) -> Generator[Any, None, None]:
        """Return a generator that yields the samples of each piece: a list, or the tensors of a TensorDataset."""
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
