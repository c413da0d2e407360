"""Errors for arguments that a function does not take; of other libraries' they say what stands for them here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def check(
    call: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], remedies: dict[str, str]
) -> None:
    """TypeError for the first argument that is unknown, with its remedy, or for arguments that do not fit otherwise."""
    known = {name: parameter for name, parameter in signature.parameters.items() if name != "self"}
    are = ", ".join(f"{name}=" if part.kind is part.KEYWORD_ONLY else name for name, part in known.items())
    for argument in kwargs:
        if argument not in known:
            remedy = remedies.get(argument, f"arguments are: {are}")
            raise TypeError(f"{call}: argument {argument!r} is unknown; {remedy}") from None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{call}: {error}; arguments are: {are}") from None


def explain(call: str, **remedies: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function say what stands for an argument that it does not have."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                check(call, inspect.signature(function), args, kwargs, remedies)
                raise

        return explained

    return decorate
