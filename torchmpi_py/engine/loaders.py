"""torch's DataLoaders on several ranks: each rank loads its share of the batches.

A DataLoader does not know about ranks. With equal seeds, every rank trains on the same batches. With different seeds,
every rank trains on all of the data, in its own order. Therefore the engine divides a DataLoader that has one of
torch's own samplers and a dataset with a length. The order is divided as in a ``DatasetIterator``, and a second
DataLoader with the same workers, collate_fn and other options loads this rank's share. The engine does not change a
DataLoader with another sampler or with an IterableDataset, because the user may have divided the data already.

The datasets must have the same class, length and attributes on all ranks. If they differ, or have attributes that
cannot be compared (a connection, a generator), an error requests a sampler, which makes the user's intention clear.
Alternative: compare samples. Why not: reading samples opens files before the workers are forked, and draws random
numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from torch.utils.data.sampler import RandomSampler, Sampler, SequentialSampler

from torchmpi_py.collectives import verbs
from torchmpi_py.core import agree
from torchmpi_py.engine import samples
from torchmpi_py.engine.batches import check_equal
from torchmpi_py.engine.iterators import DatasetIterator
from torchmpi_py.engine.same_batches import digest
from torchmpi_py.engine.sources import loaded
from torchmpi_py.runtime import process

_OF_THE_ORDER = {"self", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}

_attributes: WeakKeyDictionary[Dataset[Any], str] = WeakKeyDictionary()
"""The digest of each dataset's attributes when it was first divided, because reading may change them."""


def shard(dataset: Any, *, shuffle: bool = True, seed: int = 0) -> Sampler[int]:
    """Return a sampler of this rank's share of a dataset, for a DataLoader.

    All shares have the same length, so all ranks take the same number of steps. Up to ``size() - 1`` samples are used
    twice. Create the sampler with the same arguments on every rank of the current level, and iterate over the sampler
    the same number of times on every rank. The ranks do not communicate.

    Args:
        dataset (Dataset): object with a length.
        shuffle (bool): True (default) draws the order of epoch e from (seed, e). Each iteration uses the next epoch,
            unless ``set_epoch`` chooses another epoch. False keeps the dataset's order.
        seed (int): seed of the order, the same on every rank; default 0.

    Returns:
        A torch ``DistributedSampler``.

    Raises:
        NotStarted: ``mpi.start()`` was not called.
        TypeError: the dataset has no length.
        ValueError: the dataset is empty.

    Examples:
        >>> data = torch.utils.data.TensorDataset(torch.arange(8.0))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=mpi.shard(data))
        >>> len(loader) == -(-(-(-8 // mpi.size())) // 2)  # each rank has a share of the 8 samples, in batches of 2
        True
    """
    place = process.size(), process.rank()
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"shard: dataset is a {type(dataset).__name__} without a length, so it has no indices to divide; "
            "define its __len__, or use an engine.StreamIterator"
        )
    if len(dataset) == 0:
        raise ValueError("shard: the dataset is empty; pass a dataset with at least one sample")
    return _Shard(dataset, *place, shuffle=shuffle, seed=seed)


class _Shard(DistributedSampler[int]):
    """A DistributedSampler that advances to the next epoch with each iteration. Frameworks recognize its base class."""

    def __iter__(self) -> Iterator[int]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


def divided(iterator: Any) -> Any:
    """Return a ``DividedLoader`` for a DataLoader in torch's own order, and any other iterator unchanged.

    For a DataLoader in torch's own order, every rank of the current level must make this call. All ranks raise
    ValueError if the DataLoader cannot be divided, or if the DataLoaders or datasets differ between ranks.
    """
    if not isinstance(iterator, DataLoader) or not _has_torch_order(iterator):
        return iterator
    facts = verbs.allgather_object(_facts(iterator))
    descriptions = [each.pop("dataset") for each in facts]
    if len(set(descriptions)) > 1:
        raise ValueError(
            f"the ranks' DataLoaders have datasets that differ, or cannot be compared: {descriptions}. To divide one "
            "dataset, pass sampler=mpi.shard(dataset) to the DataLoader (and the same seed to random_split on every "
            "rank). To use all of each rank's own dataset, pass sampler=SubsetRandomSampler(range(len(dataset)))"
        )
    seed, *_ = [each.pop("seed") for each in facts]  # All ranks use rank 0's seed.
    check_equal("DataLoaders", facts)
    has_batches = iterator.batch_size is not None
    if type(iterator).__iter__ is not DataLoader.__iter__ or not has_batches:
        what = "its own __iter__" if has_batches else "batch_size=None"
        raise ValueError(
            f"a {type(iterator).__name__} with {what} cannot be divided, so every rank would use the whole dataset; "
            "pass sampler=mpi.shard(dataset) to the DataLoader"
        )
    return DividedLoader(iterator, shuffle=facts[0]["shuffle"], seed=seed)


class DividedLoader(DatasetIterator):
    """An iterator that divides the batches of a DataLoader among the ranks of the current level.

    ``loader.batch_size`` is the number of samples per rank. Each rank starts its own workers in each epoch, even with
    ``persistent_workers``. The workers' seed is computed from seed, epoch, position and rank.
    """

    def __init__(self, loader: DataLoader[Any], *, shuffle: bool, seed: int) -> None:
        assert loader.batch_size is not None, "a DataLoader without batches is not divided"
        options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": loader.drop_last}
        super().__init__(loader.dataset, loader.batch_size, prefetch=0, **options)
        names = inspect.signature(DataLoader.__init__).parameters.keys() - _OF_THE_ORDER
        self.options = {name: getattr(loader, name) for name in names} | {"persistent_workers": False}

    def _loaded(self, pieces: list[torch.Tensor], seed: int) -> Generator[Any, None, None]:
        yield from loaded(seed=seed, batch_sampler=[piece.tolist() for piece in pieces], **self.options)


def _facts(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the properties of a DataLoader that must be equal on all ranks, and its seed."""
    seeds = [generator.initial_seed() for generator in samples.generators(loader).values()]
    return {
        "dataset": _described(loader.dataset),
        "seed": (seeds or [0])[0],
        "batch_size": loader.batch_size,
        "shuffle": isinstance(loader.sampler, RandomSampler),
        "drop_last": loader.drop_last,
    }


def _described(dataset: Any) -> str:
    """Return a text with the class, the length and a digest of the attributes of a dataset.

    If the attributes cannot be compared, the text contains this rank's number, so that the ranks' texts differ.
    """
    text = f"{type(dataset).__name__} of {len(dataset)} samples"
    try:
        # A key of _attributes must be hashable, and support weak references.
        can_be_key = isinstance(dataset, Dataset) and dataset.__hash__ is not None
        attributes = _attributes[dataset] if can_be_key and dataset in _attributes else digest(dataset)
        if can_be_key:
            _attributes[dataset] = attributes
        return f"{text}, attributes {attributes}"
    except Exception as error:
        return f"{text} on rank {process.rank()}, not comparable ({type(error).__name__}: {agree.first_line(error)})"


def _has_torch_order(loader: DataLoader[Any]) -> bool:
    """Return whether the loader yields each sample of the dataset once, in sequential or in random order."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(sampler) not in (SequentialSampler, RandomSampler) or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        return False
    is_with_replacement = getattr(sampler, "replacement", False)
    has_its_batches = batches is None or (type(batches) is BatchSampler and batches.sampler is sampler)
    return has_its_batches and not is_with_replacement and len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type,attr-defined]
