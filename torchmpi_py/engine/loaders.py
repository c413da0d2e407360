"""DataLoaders of torch on several ranks: each rank loads its share of the batches.

A DataLoader knows nothing of ranks: with ``shuffle=True`` alone every rank trains on the same batches, or, seeded
apart, on all of the data in an order of its own. The engine divides a DataLoader whose order it knows (torch's own
samplers over a dataset with a length) as a ``DatasetIterator`` divides its dataset, and lets a second DataLoader with
the same workers, collate_fn and so on load the shares. Any other DataLoader is left as it is, for its user may have
divided it: one with another sampler, with an IterableDataset, or with a different dataset on each rank. So is one of a
class that iterates in its own way, of which rank 0 warns.

Datasets are one if they have the same length and the same samples at a few places, whatever their attributes: what a
dataset holds may be a connection, or the rank. The samples are read as the loader would read them, by its worker if it
has some (what they open there is not carried along by a fork), with the random generators seeded alike. Only where they
cannot be compared do the attributes decide, and rank 0 warns.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from torchmpi_py.collectives import verbs
from torchmpi_py.core import agree, ulfm
from torchmpi_py.engine import samples
from torchmpi_py.engine.batches import check_equal
from torchmpi_py.engine.iterators import DatasetIterator
from torchmpi_py.engine.sources import PieceLoader, begun
from torchmpi_py.nn.first_batches import short_digest, whole_digest
from torchmpi_py.runtime import process

logger = logging.getLogger("torchmpi_py")

_NUM_COMPARED = 8  # samples of each rank's dataset
_OF_THE_ORDER = {"self", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}


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

    Collective over the current level where it is such a DataLoader. ValueError, on all ranks, for one that has no
    batches to divide (``batch_size=None``), and for DataLoaders that differ between ranks.
    """
    alone = process.size() == 1 and not ulfm.is_elastic()
    if alone or not isinstance(iterator, DataLoader) or not _has_torch_order(iterator):
        return iterator
    kind = type(iterator)
    if any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")):
        if process.rank() == 0:
            _warn_of_kind(kind.__name__)
        return iterator
    offers = verbs.allgather_object(_offer(iterator))
    if not _is_one_dataset(iterator, offers):
        return iterator
    if iterator.batch_size is None:
        raise ValueError(
            "a DataLoader with batch_size=None gives every rank the same samples, and cannot be divided: give it "
            "sampler=mpi.shard(dataset)"
        )
    names = ("batch_size", "shuffle", "drop_last")
    check_equal("DataLoaders", [{name: getattr(offer, name) for name in names} for offer in offers])
    return DividedLoader(iterator, shuffle=offers[0].shuffle, seed=offers[0].seed)


class DividedLoader(DatasetIterator):
    """A DataLoader's batches, divided among the ranks of the current level like those of a ``DatasetIterator``.

    ``loader.batch_size`` is per rank, and its workers are this rank's own. They are seeded from (seed, epoch, rank).
    """

    def __init__(self, loader: DataLoader[Any], *, shuffle: bool, seed: int) -> None:
        assert loader.batch_size is not None, "one without batches is not divided"
        super().__init__(
            loader.dataset, loader.batch_size, shuffle=shuffle, seed=seed, prefetch=0, drop_last=loader.drop_last
        )
        self._reader = PieceLoader(**_kept(loader))
        self.loader = self._reader.loader

    def _loaded(self, pieces: list[torch.Tensor]) -> Generator[Any, None, None]:
        yield from self._reader.read([piece.tolist() for piece in pieces], self._seed_of_workers())


class _Offer(NamedTuple):
    """The facts about a DataLoader that are equal on all ranks; and the seed, of which rank 0's counts."""

    length: int
    attributes: bytes  # a digest of the dataset's
    batch_size: int | None
    shuffle: bool
    drop_last: bool
    seed: int


def _offer(loader: DataLoader[Any]) -> _Offer:
    dataset: Any = loader.dataset
    seeds = [generator.initial_seed() for generator in samples.generators(loader).values()]
    shuffle = isinstance(loader.sampler, RandomSampler)
    attributes = short_digest(dataset)
    return _Offer(len(dataset), attributes, loader.batch_size, shuffle, loader.drop_last, (seeds or [0])[0])


def _is_one_dataset(loader: DataLoader[Any], offers: list[_Offer]) -> bool:
    """Whether all ranks have the same dataset; a guess comes with a warning. Collective."""
    is_one, obstacle = False, ""
    if all(offer.length == offers[0].length for offer in offers):
        is_one, obstacle = _compared_samples(loader)
    are_equal = all(offer[:2] == offers[0][:2] for offer in offers)
    if obstacle:
        is_one = are_equal
    if process.rank() > 0:
        return is_one
    if obstacle:
        outcome = "are equal: they are divided as one" if is_one else "differ: each rank keeps its own"
        _warn_once(f"cannot be compared by samples ({obstacle}); their attributes {outcome}")
    elif not is_one and are_equal:
        _warn_once("have equal attributes but different samples: each rank keeps its own")
    elif not is_one:
        logger.info("the ranks' DataLoaders have different datasets, and are left as they are")
    return is_one


@functools.cache
def _warn_of_kind(name: str) -> None:
    logger.warning(
        "a %s iterates in its own way, and is not divided: every rank gets the samples that it gives there. Give it "
        "sampler=mpi.shard(dataset), unless it divides them itself",
        name,
    )


@functools.cache
def _warn_once(outcome: str) -> None:
    logger.warning(
        "the datasets of the ranks' DataLoaders %s. To choose, give them a sampler: mpi.shard(dataset) divides one "
        "dataset, SubsetRandomSampler(range(len(dataset))) lets each rank keep all of its own",
        outcome,
    )


def _compared_samples(loader: DataLoader[Any]) -> tuple[bool, str]:
    """Whether some samples are the same on all ranks; and what, if anything, prevents a comparison. Collective."""
    states = samples.random_states()
    try:
        with closing(_readings(loader)) as readings:
            first = _next_reading(readings)
            firsts = verbs.allgather_object(first)
            for rank, reading in enumerate(firsts):
                if isinstance(reading, str):
                    return False, f"rank {rank}: {reading}"
            if agree.first_different(firsts) is None:
                return True, ""
            is_repeatable = verbs.allgather_object(_next_reading(readings) == first)
            return False, "" if all(is_repeatable) else "they change from one reading to the next"
    finally:
        samples.restore_random_states(states)


def _readings(loader: DataLoader[Any]) -> Generator[list[bytes], None, None]:
    """Digests of the same few samples, time after time, as the loader reads these: by a worker if it has some."""
    last, steps = len(loader.dataset) - 1, _NUM_COMPARED - 1  # type: ignore[arg-type]
    places = sorted({last * step // steps for step in range(_NUM_COMPARED)}) if last >= 0 else []
    options = {name: value for name, value in _kept(loader).items() if not name.startswith("pin_memory")} | {
        "num_workers": min(loader.num_workers, 1),
        "worker_init_fn": functools.partial(_init_worker, loader.worker_init_fn),
        "collate_fn": _digests,
        "persistent_workers": False,
    }
    _seed_alike()
    yield from begun(DataLoader(batch_sampler=[places] * 2, generator=torch.Generator(), **options))


def _next_reading(readings: Iterator[list[bytes]]) -> list[bytes] | str:
    """The digests, or the error of the dataset, which the loop that trains will show where it belongs."""
    try:
        return next(readings)
    except Exception as error:
        return f"{type(error).__name__}: {agree.first_line(error)}"


def _digests(items: list[Any]) -> list[bytes]:
    digests = [whole_digest(item) for item in items]
    _seed_alike()  # for the next reading
    return digests


def _init_worker(users: Any, worker: int) -> None:
    if users is not None:
        users(worker)
    _seed_alike()


def _seed_alike() -> None:
    torch.default_generator.manual_seed(0)  # CUDA's is left alone
    np.random.seed(0)
    random.seed(0)


def _has_torch_order(loader: DataLoader[Any]) -> bool:
    """Whether the loader gives all samples of the dataset once, in their order or in a random one."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(sampler) not in (SequentialSampler, RandomSampler) or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        return False
    is_with_replacement = getattr(sampler, "replacement", False)
    has_its_batches = batches is None or (type(batches) is BatchSampler and batches.sampler is sampler)
    return has_its_batches and not is_with_replacement and len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type,attr-defined]


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    """The loader's arguments that do not concern the order, as this version of torch knows them."""
    names = inspect.signature(DataLoader.__init__).parameters.keys() - _OF_THE_ORDER
    return {name: getattr(loader, name) for name in names}
