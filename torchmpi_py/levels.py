"""The levels with which a started process begins: the user's own, and those of nodes or IPC groups."""

from __future__ import annotations

from collections.abc import Callable

from torchmpi_py import communicators, gpus


def push(custom: Callable[[], int] | None, collective: Callable[[], int | None] | None) -> None:
    """The user's levels, then those for hierarchical collectives; the span is between the two. Collective."""
    stack = communicators.stack()
    entry = 0 if custom is None else custom()
    communicators.set_communicator(_checked_level("custom_communicator_init", entry))
    if collective is None:
        group, node = gpus.group(stack.place), stack.place.node
        end = stack.push(f"node of rank {node}" if group == node else f"IPC group of rank {group}")
    else:
        given = collective()
        end = entry if given is None else _checked_level("collective_communicator", given)
        communicators.set_communicator(entry)
    communicators.set_collective_span(entry, end)


def _checked_level(what: str, level: object) -> int:
    if isinstance(level, bool) or not isinstance(level, int):
        raise TypeError(f"{what} returned {level!r}; it must return the index of the deepest level that it pushed")
    communicators.stack().level(level)
    return level
