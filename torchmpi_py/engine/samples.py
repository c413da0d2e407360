"""Samples: the parts of a sample, the samples of an epoch, and the random generators that determine their order.

An iterator with ``state_dict`` and ``load_state_dict`` (a ``DatasetIterator``, a ``StreamIterator``, torchdata's
StatefulDataLoader) can continue in the middle of an epoch; any other iterator begins the epoch again. The order of an
epoch may depend on random generators: the ``generator`` of the iterator or of its samplers, or the global generators of
the process (torch's, CUDA's, numpy's, Python's). A checkpoint contains the states of all these generators, as plain
data.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterDataPipe

from torchmpi_py.engine import outcomes
from torchmpi_py.engine.batches import BatchIterator, logger
from torchmpi_py.engine.sources import set_epoch
from torchmpi_py.engine.state import State


def length(sample: Any) -> int | None:
    """Return the length of the sample's target, which is the number of samples.

    Return 0 for None. Return None if the sample has no target, or if the target has no length, because
    ``hooks.on_sample`` may still replace the sample.
    """
    if sample is None:
        return 0
    try:
        return len(split(sample)[1])
    except (TypeError, IndexError):
        return None


def split(sample: Any) -> tuple[Any, Any]:
    """Return (input, target) of a sample. Raise TypeError unless it is a tuple or list of two or more elements."""
    if isinstance(sample, (tuple, list)) and len(sample) >= 2:
        return sample[0], sample[1]
    what = f"{type(sample).__name__} of length {len(sample)}" if hasattr(sample, "__len__") else type(sample).__name__
    raise TypeError(
        f"sample is a {what}; the engine needs (input, target): "
        "let the iterator return pairs, or set state.sample to a pair in hooks.on_sample"
    )


def check_repeatable(iterator: Iterable[Any], maxepoch: int) -> None:
    """Raise TypeError if ``maxepoch`` is above 1 but the iterator can be iterated only once."""
    # Check the type first, because iter() of a DataLoader starts its workers.
    if maxepoch > 1 and isinstance(iterator, Iterator) and iter(iterator) is iterator:
        raise TypeError(
            f"iterator is a {type(iterator).__name__}, which can be iterated only once, and maxepoch={maxepoch}; "
            "use an iterable that starts again at each epoch, such as a list or a DataLoader"
        )


def of_epoch(state: State) -> Iterator[Any]:
    """Return an iterator over the samples of ``state.epoch`` from ``state.position`` on."""
    iterator = state.iterator
    # The same sampler may occur under several names; call its set_epoch once.
    holders = {id(each): each for each in (iterator, *samplers_of(iterator).values())}
    for holder in holders.values():
        set_epoch(holder, state.epoch)
    if state.position > 0 and isinstance(iterator, BatchIterator):
        iterator.set_position(state.position)
    batches = _started(iterator)
    state.place.batches = batches if isinstance(iterator, BatchIterator) else None
    return batches


def count(state: State) -> None:
    """Set ``state.num_samples`` if it was unknown before ``hooks.on_sample``, which may have replaced the batch."""
    if state.num_samples is None:
        state.num_samples = length(state.sample) or 1


@contextmanager
def closed(state: State) -> Iterator[None]:
    """Close the generator of an epoch's batches after the block, because an error's traceback may keep it alive."""
    try:
        yield
    finally:
        if state.place.batches is not None:
            state.place.batches.close()


def _started(iterator: Any) -> Iterator[Any]:
    """Return ``iter(iterator)`` without changing the loader's generator when persistent workers start.

    torch draws a seed from the loader's generator when the workers start, in the first epoch of a process. So a resumed
    run would draw one number more than an uninterrupted run. Here the workers' seed comes from a different generator,
    which is seeded from the state of the loader's generator.
    """
    has_lasting_workers = isinstance(iterator, DataLoader) and iterator.persistent_workers
    if not has_lasting_workers or isinstance(iterator.dataset, IterDataPipe):  # A DataPipe draws a number every epoch.
        return iter(iterator)
    generator = iterator.generator
    seed = _number_of(torch.get_rng_state() if generator is None else generator.get_state())
    iterator.generator = torch.Generator().manual_seed(seed)
    try:
        return iter(iterator)
    finally:
        iterator.generator = generator


def place_of(iterator: Any) -> dict[str, Any] | None:
    """Return the state from which the iterator can continue in an epoch, or None if it cannot load a state."""
    return iterator.state_dict() if hasattr(iterator, "load_state_dict") else None


def restore_place(iterator: Any, place: dict[str, Any] | None, position: int) -> int:
    """Set the iterator to continue at a saved place, and return the position where it continues.

    Without a ``place``, the epoch begins again at position 0, and rank 0 logs a warning. Raise ValueError if the order
    of samples has changed.
    """
    if place is not None and position > 0:
        iterator.load_state_dict(place)
        return position
    if position > 0 and outcomes.rank() == 0:
        name = type(iterator).__name__
        text = "the position of a %s in the epoch is unknown, so the epoch begins again; to continue in an epoch, use"
        logger.warning(f"{text} a DatasetIterator or torchdata's StatefulDataLoader, on the same number of ranks", name)
    return 0


def samplers_of(iterator: Any) -> dict[str, Any]:
    """Return the samplers of a DataLoader, or of a similar iterator, keyed by name. A missing sampler is None."""
    batches = getattr(iterator, "batch_sampler", None)
    sampler, of_batches = getattr(iterator, "sampler", None), getattr(batches, "sampler", None)
    return {"sampler": sampler, "batch_sampler": batches, "batch_sampler.sampler": of_batches}


def generators(iterator: Any) -> dict[str, torch.Generator]:
    """Return the random generators of the iterator and of its samplers, keyed by the name of their owner.

    The same generator may occur under several names.
    """
    holders = {"iterator": iterator, **samplers_of(iterator)}
    attributes = {name: getattr(holder, "generator", None) for name, holder in holders.items()}
    return {name: generator for name, generator in attributes.items() if isinstance(generator, torch.Generator)}


def generator_states(iterator: Any) -> dict[str, torch.Tensor]:
    """Return the current states of ``generators(iterator)``."""
    return {name: generator.get_state() for name, generator in generators(iterator).items()}


def restore_generators(iterator: Any, states: dict[str, torch.Tensor]) -> None:
    """Set the generators of the iterator to these states. Generators without a saved state do not change."""
    for name, generator in generators(iterator).items():
        if name in states:
            generator.set_state(states[name])


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators, including the current GPU's if CUDA is initialized."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states["numpy"] = tree_map_only(np.ndarray, np.ndarray.tolist, np.random.get_state(legacy=False))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the global random generators to these states. Ignore the state for CUDA if there is no GPU."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if states["numpy"]["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"]:
        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def derive_random_states(states: dict[str, Any], rank: int) -> None:
    """Seed this rank's global random generators from another rank's states and this rank's number."""
    seed = _number_of(states["torch"])
    torch.manual_seed((seed << 24) + rank)
    np.random.seed([seed, rank])
    random.seed((seed << 24) + rank)


def _number_of(state: torch.Tensor) -> int:
    """Return a number computed from the state of a torch generator."""
    return zlib.crc32(state.numpy().tobytes())
