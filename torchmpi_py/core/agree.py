"""Steps that succeed on all ranks or fail on all: no rank waits for one that has given up.

``allgather`` is the collective by which the ranks exchange how the step ended there: that of an MPI communicator, or a
function of one value that returns the values of all ranks in rank order.
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
    """What ``step`` returns on this rank, once the step has succeeded on every rank. Collective.

    If the step raises one of ``caught`` on any rank, every rank raises ``failed(descriptions)``: what ``describe``
    makes of each exception, by rank, the lowest first. Other exceptions stay with the rank where they are raised.
    """
    results: list[T] = []  # not sent: the result may be memory or a connection
    gather_results(allgather, lambda: results.append(step()), caught, describe, failed)
    return results[0]


def gather_results(
    allgather: AllGather,
    step: Callable[[], T],
    caught: Caught,
    describe: Callable[[Exception], Text],
    failed: Callable[[Mapping[int, Text]], Exception],
) -> list[T]:
    """Like ``run_on_all_ranks``, but returns the results of all ranks in rank order; each travels by pickle."""
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
        del cause  # its traceback refers to this frame: a cycle, which would hold the memory that the step has used
    return [result for result, _ in outcomes]


def first_line(error: Exception) -> str:
    """The message of an error without the stack that torch appends."""
    return str(error).partition("\n")[0]


def first_text(failures: Mapping[int, str]) -> str:
    """The description from the lowest rank that failed."""
    return next(iter(failures.values()))


def alone(mine: T) -> list[T]:
    """The allgather of a rank that is alone."""
    return [mine]


def first_difference(these: Sequence[T], those: Sequence[T], past_the_end: T) -> tuple[int, T, T]:
    """The first index at which two lists differ, and what each has there; the lists are not equal."""
    pairs = itertools.zip_longest(these, those, fillvalue=past_the_end)
    return next((index, this, that) for index, (this, that) in enumerate(pairs) if this != that)


def first_as(kind: type[Exception], before: str = "") -> Callable[[Mapping[int, str]], Exception]:
    """A ``failed`` that makes a ``kind`` of ``before`` and the description from the lowest rank that failed."""
    return lambda failures: kind(before + first_text(failures))


def kind_and_text(error: Exception) -> tuple[bool, str]:
    """A ``describe`` for ``same_error``: whether it is a TypeError, else a ValueError, and its text."""
    return isinstance(error, TypeError), str(error)


def same_error(failures: Mapping[int, tuple[bool, str]]) -> Exception:
    """A ``failed`` that makes a TypeError or ValueError as on the lowest rank that failed."""
    rank, (is_type_error, text) = next(iter(failures.items()))
    return (TypeError if is_type_error else ValueError)(f"{text} (rank {rank})")


def first_different(values: Sequence[object]) -> int | None:
    """The lowest rank whose value differs from rank 0's; None if all values are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
