"""The order in which an iterator gives samples: what it follows from, and whether a place in it is one in another.

A place in the middle of an epoch is of use only in the same order. What an order follows from is known in part: of a
``DatasetIterator`` the number of samples, the seed, and whether it shuffles; of others their lengths, and the random
generators that they, or their samplers, hold (torch's word: ``generator``), whose states a checkpoint keeps.

What gives samples, and what a sample is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchmpi_py.engine import outcomes, rng_state
from torchmpi_py.engine.state import State


def holders(iterator: Any) -> Iterator[tuple[str, Any]]:
    """The iterator, and the samplers that it draws from, as a DataLoader has them, each with a name."""
    yield "iterator", iterator
    yield "sampler", getattr(iterator, "sampler", None)
    batches = getattr(iterator, "batch_sampler", None)
    yield "batch_sampler", batches
    yield "batch_sampler.sampler", getattr(batches, "sampler", None)


def generators(iterator: Any) -> dict[str, torch.Generator]:
    """Their own random generators; the same one may have several names."""
    held = ((name, getattr(holder, "generator", None)) for name, holder in holders(iterator))
    return {name: generator for name, generator in held if isinstance(generator, torch.Generator)}


def captured(iterator: Any) -> dict[str, torch.Tensor]:
    """The states of these generators now."""
    return {name: generator.get_state() for name, generator in generators(iterator).items()}


def restore(iterator: Any, states: dict[str, torch.Tensor]) -> None:
    """Let them go on from there; those that had no state are left alone."""
    for name, generator in generators(iterator).items():
        if name in states:
            generator.set_state(states[name])


def known(iterator: Any) -> dict[str, Any]:
    """What the order of samples follows from, and the batches, where places count batches; as far as it is known."""
    if hasattr(iterator, "set_position"):
        told = {"samples": "total", "seed": "seed", "shuffle": "shuffle"}
        found = {word: getattr(iterator, name, None) for word, name in told.items()}
        ranks = getattr(iterator, "size", None)
        found["ranks"] = None if ranks == outcomes.size() else ranks  # each rank may have a dataset of its own
    else:
        found = {
            "samples": _length(getattr(iterator, "dataset", None)),
            "batches": _length(iterator),
            "batch size": getattr(iterator, "batch_size", None),
            "generators of": ", ".join(generators(iterator)) or None,
        }
    return {word: value for word, value in found.items() if isinstance(value, (int, str))}


def check_place(iterator: Any, order: dict[str, Any], position: int, size: int) -> None:
    """ValueError if a place in the middle of an epoch in this ``order``, on ``size`` ranks, is none in this iterator's.

    Each rank looks at its own.
    """
    if position == 0:
        return
    now = known(iterator)
    is_of_all = hasattr(iterator, "set_position") and "ranks" not in now
    if size != outcomes.size() and not is_of_all:
        raise ValueError(
            f"the checkpoint is of {size} ranks after {position} batches of an epoch; on {outcomes.size()} ranks that "
            "would be other samples: use a DatasetIterator over the dataset of all, or every='epoch'"
        )
    if order != now:
        raise ValueError(
            f"the checkpoint is in the middle of an epoch over {_described(order)}; "
            f"this is another order: {_described(now)}"
        )


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # an IterableDataset, and what loads one
        return None


def _described(order: dict[str, Any]) -> str:
    counts = ("samples", "batches")
    told = (f"{value} {word}" if word in counts else f"{word} {value}" for word, value in order.items())
    return ", ".join(told) or "samples of an unknown order"


def of_epoch(state: State) -> Iterator[Any]:
    """The samples of ``state.epoch`` from ``state.position`` on.

    What has no ``set_position`` begins anew, and they are skipped. It may shuffle by the global random generators, as a
    DataLoader does, or by its own: it begins with those of the epoch's begin, and those of now come back afterwards.
    """
    iterator = state.iterator
    samplers = [getattr(iterator, name, None) for name in ("sampler", "batch_sampler")]
    for holder in (iterator, *samplers):
        getattr(holder, "set_epoch", _ignored)(state.epoch)
    if hasattr(iterator, "set_position"):
        if state.position > 0:
            iterator.set_position(state.position)
        return iter(iterator)
    if state.position > 0:
        return _skipped(state)
    if state.training:
        state.epoch_random = {"global": rng_state.captured(), "iterator": captured(iterator)}
    return iter(iterator)


def _skipped(state: State) -> Iterator[Any]:
    now, own_now = rng_state.captured(), captured(state.iterator)
    if state.epoch_random is not None:
        rng_state.restore(state.epoch_random["global"])
        restore(state.iterator, state.epoch_random["iterator"])
    samples = iter(state.iterator)
    for _ in range(state.position):
        next(samples, None)
    rng_state.restore(now)
    restore(state.iterator, own_now)
    return samples


def _ignored(epoch: int) -> None:
    """The set_epoch of an iterator that has none."""


def check_repeatable(iterator: Iterable[Any], maxepoch: int) -> None:
    """TypeError if it can be run through only once, and has to be more often."""
    # The first question comes first because iter() of a DataLoader starts its workers.
    if maxepoch > 1 and isinstance(iterator, Iterator) and iter(iterator) is iterator:
        raise TypeError(
            f"iterator is a {type(iterator).__name__}, which can be run through only once, and maxepoch={maxepoch}: "
            "give what starts anew at each epoch, such as a list, a DataLoader, or an object whose __iter__ does"
        )


def length(sample: Any) -> int:
    """Number of samples by the target's length, else 1. No error here: hooks.on_sample may still replace the sample."""
    try:
        return len(split(sample)[1])
    except (TypeError, IndexError):
        return 1


def split(sample: Any) -> tuple[Any, Any]:
    """(input, target) of a sample, or a TypeError that says what came instead."""
    if isinstance(sample, (tuple, list)) and len(sample) >= 2:
        return sample[0], sample[1]
    what = f"{type(sample).__name__} of length {len(sample)}" if hasattr(sample, "__len__") else type(sample).__name__
    raise TypeError(
        f"sample is a {what}; the engine needs (input, target): "
        "let the iterator give pairs, or make one of state.sample in hooks.on_sample"
    )
