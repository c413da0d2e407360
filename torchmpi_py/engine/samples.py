"""What gives samples, and what a sample is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torchmpi_py.engine import orders, random_states
from torchmpi_py.engine.state import State


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
        state.epoch_random = {"global": random_states.captured(), "iterator": orders.captured(iterator)}
    return iter(iterator)


def _skipped(state: State) -> Iterator[Any]:
    now, own_now = random_states.captured(), orders.captured(state.iterator)
    if state.epoch_random is not None:
        random_states.restore(state.epoch_random["global"])
        orders.restore(state.iterator, state.epoch_random["iterator"])
    samples = iter(state.iterator)
    for _ in range(state.position):
        next(samples, None)
    random_states.restore(now)
    orders.restore(state.iterator, own_now)
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
