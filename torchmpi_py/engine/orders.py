"""The order in which an iterator gives samples: what it follows from, and whether a place in it is one in another.

A place in the middle of an epoch is of use only in the same order. What an order follows from is known in part: of a
``DatasetIterator`` the number of samples, the seed, and whether it shuffles; of others their lengths, and the random
generators that they, or their samplers, hold (torch's word: ``generator``), whose states a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchmpi_py.engine import outcomes


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
