"""DataLoaders of torch on several ranks: each rank loads its share of the batches.

A DataLoader knows nothing of ranks: with ``shuffle=True`` alone every rank trains on the same batches, or, seeded
apart, on all of the data in an order of its own. The engine divides a DataLoader whose order it knows (torch's own
samplers over a dataset with a length) as a ``DatasetIterator`` divides its dataset, and lets a second DataLoader with
the same workers, collate_fn and so on load the shares. A DataLoader with another sampler, or with an IterableDataset,
is left as it is, for its user may have divided it.

To be divided, the datasets have to be one: of the same class, length and attributes on all ranks. Where they are not,
or hold what cannot be compared (a connection, a generator), an error asks for a sampler, which says what is meant. An
alternative is to compare samples, but reading them opens files before workers are forked, and draws random numbers.
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
"""The digest of each dataset when it was first divided: reading may open files, and fill a cache."""


def shard(dataset: Any, *, shuffle: bool = True, seed: int = 0) -> Sampler[int]:
    """A sampler of this rank's share of a dataset: ``DataLoader(dataset, 32, sampler=mpi.shard(dataset))``.

    All shares have the same length, so that all ranks take the same number of steps: up to ``size() - 1`` samples occur
    twice. With ``shuffle`` epoch e has an order drawn from (seed, e); each iteration is the next epoch, and
    ``set_epoch`` chooses another. All ranks of the current level make and iterate it alike; it is not collective.

    Raises NotStarted before ``mpi.start()``, TypeError for a dataset without a length, ValueError for an empty one.
    """
    place = process.size(), process.rank()
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"shard: dataset is a {type(dataset).__name__} without a length, so that it has no indices to share "
            "out; give it to an engine.StreamIterator"
        )
    if len(dataset) == 0:
        raise ValueError("shard: the dataset is empty: there is nothing to share out")
    return _Shard(dataset, *place, shuffle=shuffle, seed=seed)


class _Shard(DistributedSampler[int]):
    """Torch's sampler, which frameworks know; each iteration moves on to the next epoch."""

    def __iter__(self) -> Iterator[int]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


def divided(iterator: Any) -> Any:
    """The iterator; instead of a DataLoader that would give all ranks the same samples, its ``DividedLoader``.

    Collective over the current level where it is such a DataLoader. ValueError, on all ranks, for one that cannot be
    divided, and for DataLoaders or datasets that differ between ranks.
    """
    if not isinstance(iterator, DataLoader) or not _has_torch_order(iterator):
        return iterator
    facts = verbs.allgather_object(_facts(iterator))
    descriptions = [each.pop("dataset") for each in facts]
    if len(set(descriptions)) > 1:
        raise ValueError(
            "the ranks' DataLoaders have datasets that differ, or cannot be compared, so that it is not clear whether "
            f"to divide them: {descriptions}. Give random_split a generator with the same seed on every rank; give the "
            "DataLoader sampler=mpi.shard(dataset) to divide one dataset, or "
            "sampler=SubsetRandomSampler(range(len(dataset))) to let each rank use all of its own"
        )
    seed, *_ = [each.pop("seed") for each in facts]  # rank 0's counts
    check_equal("DataLoaders", facts)
    has_batches = iterator.batch_size is not None
    if type(iterator).__iter__ is not DataLoader.__iter__ or not has_batches:
        what = "an __iter__ of its own" if has_batches else "batch_size=None"
        raise ValueError(
            f"a {type(iterator).__name__} with {what} cannot be divided, and would give every rank the same samples: "
            "give it sampler=mpi.shard(dataset)"
        )
    return DividedLoader(iterator, shuffle=facts[0]["shuffle"], seed=seed)


class DividedLoader(DatasetIterator):
    """A DataLoader's batches, divided among the ranks of the current level like those of a ``DatasetIterator``.

    ``loader.batch_size`` is per rank. Its workers are this rank's own, started in each epoch, with
    ``persistent_workers`` too, and seeded from (seed, epoch, rank).
    """

    def __init__(self, loader: DataLoader[Any], *, shuffle: bool, seed: int) -> None:
        assert loader.batch_size is not None, "one without batches is not divided"
        options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": loader.drop_last}
        super().__init__(loader.dataset, loader.batch_size, prefetch=0, **options)
        names = inspect.signature(DataLoader.__init__).parameters.keys() - _OF_THE_ORDER
        self.options = {name: getattr(loader, name) for name in names} | {"persistent_workers": False}

    def _loaded(self, pieces: list[torch.Tensor], seed: int) -> Generator[Any, None, None]:
        yield from loaded(seed=seed, batch_sampler=[piece.tolist() for piece in pieces], **self.options)


def _facts(loader: DataLoader[Any]) -> dict[str, Any]:
    """The facts about a DataLoader that are equal on all ranks; and its seed."""
    seeds = [generator.initial_seed() for generator in samples.generators(loader).values()]
    return {
        "dataset": _described(loader.dataset),
        "seed": (seeds or [0])[0],
        "batch_size": loader.batch_size,
        "shuffle": isinstance(loader.sampler, RandomSampler),
        "drop_last": loader.drop_last,
    }


def _described(dataset: Any) -> str:
    """Class, length and attributes of a dataset; a text of this rank alone where they cannot be compared."""
    text = f"{type(dataset).__name__} of {len(dataset)} samples"
    try:
        can_be_key = isinstance(dataset, Dataset) and dataset.__hash__ is not None  # others have no weak references
        attributes = _attributes[dataset] if can_be_key and dataset in _attributes else digest(dataset)
        if can_be_key:
            _attributes[dataset] = attributes
        return f"{text}, attributes {attributes}"
    except Exception as error:
        return f"{text} on rank {process.rank()}, not comparable ({type(error).__name__}: {agree.first_line(error)})"


def _has_torch_order(loader: DataLoader[Any]) -> bool:
    """Whether the loader gives all samples of the dataset once, in their order or in a random one."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(sampler) not in (SequentialSampler, RandomSampler) or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        return False
    is_with_replacement = getattr(sampler, "replacement", False)
    has_its_batches = batches is None or (type(batches) is BatchSampler and batches.sampler is sampler)
    return has_its_batches and not is_with_replacement and len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type,attr-defined]
