"""The two forms of a verb, made from the one function that checks its arguments and prepares the operation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torchmpi_py.collectives.operation import Operation
from torchmpi_py.handles import Handle

P = ParamSpec("P")
R = TypeVar("R")


def forms(prepare: Callable[P, Operation[R]]) -> tuple[Callable[P, R], Callable[P, Handle[R]]]:
    """(blocking, asynchronous) form of the verb that ``prepare`` prepares."""

    @functools.wraps(prepare)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> R:
        return prepare(*args, **kwargs).run()

    @functools.wraps(prepare)
    def asynchronous(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        return prepare(*args, **kwargs).launch()

    name = prepare.__name__.lstrip("_")
    result = str(inspect.signature(prepare).return_annotation).removeprefix("Operation[").removesuffix("]")
    _present(blocking, prepare, name, result, prepare.__doc__)
    _present(
        asynchronous, prepare, f"{name}_async", f"Handle[{result}]", f"Launch ``{name}``; return at once a Handle."
    )
    return blocking, asynchronous


def preparing(verb: Callable[P, R]) -> Callable[P, Operation[R]]:
    """What prepares the operation of a verb, for those who carry it out in their own way."""
    prepare: Callable[P, Operation[R]] = inspect.unwrap(verb)
    return prepare


def _present(form: Any, prepare: Callable[..., Any], name: str, result: str, doc: str | None) -> None:
    """What ``help()`` shows."""
    form.__name__ = form.__qualname__ = name
    form.__doc__ = doc
    form.__annotations__ = {**prepare.__annotations__, "return": result}
    form.__signature__ = inspect.signature(prepare).replace(return_annotation=result)
