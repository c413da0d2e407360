"""Steps that succeed on all ranks or fail on all ranks, so that no rank waits for a rank that has given up.

The ranks exchange the outcome of the step by ``allgather``. This argument is the method of an MPI communicator, or any
function that takes one value and returns the values of all ranks in rank order.
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
    """Run ``step`` on every rank, and return this rank's result once the step has succeeded on all ranks.

    Every rank must make this call. If the step raises one of ``caught`` on any rank, every rank raises
    ``failed(descriptions)``. The dictionary ``descriptions`` maps each rank that failed, the lowest first, to the
    result of ``describe`` for the rank's exception. Any other exception is raised only on the rank where it
    occurred.
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
    """Run ``step`` as ``run_on_all_ranks`` does, and return the results of all ranks in rank order.

    The ranks exchange their results by pickle.
    """
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
        # The traceback refers to this frame, which refers to ``cause``. This cycle would keep the step's memory alive.
        del cause
    return [result for result, _ in outcomes]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the stack that torch appends."""
    return str(error).partition("\n")[0]


def first_text(failures: Mapping[int, str]) -> str:
    """Return the description from the lowest rank that failed."""
    return next(iter(failures.values()))


def alone(mine: T) -> list[T]:
    """Return ``mine`` in a list: the ``allgather`` of a group of one rank."""
    return [mine]


def first_difference(these: Sequence[T], those: Sequence[T], past_the_end: T) -> tuple[int, T, T]:
    """Return the first index at which two unequal lists differ, and the element of each list at that index.

    ``past_the_end`` replaces the missing elements of the shorter list.
    """
    pairs = itertools.zip_longest(these, those, fillvalue=past_the_end)
    return next((index, this, that) for index, (this, that) in enumerate(pairs) if this != that)


def first_as(kind: type[Exception], before: str = "") -> Callable[[Mapping[int, str]], Exception]:
    """Return a function to pass as ``failed``, which creates an error of the class ``kind``.

    The error's text is ``before``, followed by the description from the lowest rank that failed.
    """
    return lambda failures: kind(before + first_text(failures))


def kind_and_text(error: Exception) -> tuple[bool, str]:
    """Return whether an error is a TypeError, and the error's text.

    Pass this function as ``describe``, together with ``same_error`` as ``failed``.
    """
    return isinstance(error, TypeError), str(error)


def same_error(failures: Mapping[int, tuple[bool, str]]) -> Exception:
    """Return the TypeError or ValueError of the lowest rank that failed; pass this function as ``failed``."""
    rank, (is_type_error, text) = next(iter(failures.items()))
    return (TypeError if is_type_error else ValueError)(f"{text} (rank {rank})")


def first_different(values: Sequence[object]) -> int | None:
    """Return the lowest rank whose value differs from rank 0's value; None if all values are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
