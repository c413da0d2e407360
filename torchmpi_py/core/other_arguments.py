"""Errors for arguments of other libraries: they say what stands for the argument here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def check(call: str, known: Iterable[str], given: Iterable[str], remedies: Mapping[str, str]) -> None:
    """TypeError for the first argument that is not ``known``, with its remedy."""
    known = [name for name in known if name != "self"]
    for argument in given:
        if argument not in known:
            remedy = remedies.get(argument, f"arguments are: {', '.join(known)}")
            raise TypeError(f"{call}: argument {argument!r} is unknown; {remedy}") from None


def explain(call: str, **remedies: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function say what stands for an argument that it does not have."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                check(call, inspect.signature(function).parameters, kwargs, remedies)
                raise

        return explained

    return decorate
