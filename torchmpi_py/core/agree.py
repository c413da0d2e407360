"""Steps that succeed on all ranks or fail on all ranks, so that no rank waits for a rank that has given up.

The ranks exchange the outcome of the step by ``allgather``. It is the method of an MPI communicator, or a function that
takes one value and returns the values of all ranks in rank order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Text = TypeVar("Text")
AllGather = Callable[[Any], list[Any]]
Caught = tuple[type[Exception], ...]


def run_on_all_ranks(
    allgather: AllGather,
    step: Callable[[], T],
    caught: Caught,
    describe: Callable[[Exception], Text],
    failed: Callable[[Mapping[int, Text]], Exception],
) -> T:
    """Run ``step`` on every rank, and return this rank's result once the step has succeeded on all ranks. Collective.

    If the step raises one of ``caught`` on any rank, every rank raises ``failed(descriptions)``. The descriptions are
    the results of ``describe`` for each exception, by rank, the lowest rank first. Any other exception leaves this
    function only on the rank that raised it.
    """
    results: list[T] = []  # The result stays on its rank because it may be memory or a connection.
    gather_results(allgather, lambda: results.append(step()), caught, describe, failed)
    return results[0]


def gather_results(
    allgather: AllGather,
    step: Callable[[], T],
    caught: Caught,
    describe: Callable[[Exception], Text],
    failed: Callable[[Mapping[int, Text]], Exception],
) -> list[T]:
    """Run ``step`` as ``run_on_all_ranks`` does; return the results of all ranks in rank order, sent by pickle."""
    result, descriptions, cause = None, [], None
    try:
        result = step()
    except caught as error:
        descriptions, cause = [describe(error)], error
    outcomes = allgather((result, descriptions))
    failures = {rank: text for rank, (_, descriptions) in enumerate(outcomes) for text in descriptions}
    try:
        if failures:
            raise failed(failures) from cause
    finally:
        # The traceback refers to this frame; that cycle would keep alive the memory that the step used.
        del cause
    return [result for result, _ in outcomes]


def first_line(error: Exception) -> str:
    """Return the message of an error without the stack that torch appends."""
    return str(error).partition("\n")[0]


def first_text(failures: Mapping[int, str]) -> str:
    """Return the description from the lowest rank that failed."""
    return next(iter(failures.values()))


def alone(mine: T) -> list[T]:
    """Gather the values of a single rank: the allgather of a group of one."""
    return [mine]


def first_difference(these: Sequence[T], those: Sequence[T], past_the_end: T) -> tuple[int, T, T]:
    """Return the first index at which two unequal lists differ, and the element of each list at that index."""
    pairs = itertools.zip_longest(these, those, fillvalue=past_the_end)
    return next((index, this, that) for index, (this, that) in enumerate(pairs) if this != that)


def first_as(kind: type[Exception], before: str = "") -> Callable[[Mapping[int, str]], Exception]:
    """Return a ``failed`` that creates a ``kind`` from ``before`` and the description from the lowest failed rank."""
    return lambda failures: kind(before + first_text(failures))


def kind_and_text(error: Exception) -> tuple[bool, str]:
    """Return, as the ``describe`` for ``same_error``, whether the error is a TypeError, and its text."""
    return isinstance(error, TypeError), str(error)


def same_error(failures: Mapping[int, tuple[bool, str]]) -> Exception:
    """Return, as a ``failed``, the TypeError or ValueError of the lowest rank that failed."""
    rank, (is_type_error, text) = next(iter(failures.items()))
    return (TypeError if is_type_error else ValueError)(f"{text} (rank {rank})")


def first_different(values: Sequence[object]) -> int | None:
    """Return the lowest rank whose value differs from rank 0's value; None if all values are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
