"""A progress bar on standard error of rank 0; silent without tqdm. The only file of the bench that imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def shown(items: Sequence[T], name: Callable[[T], str], *, rank: int, always: bool = False) -> Iterator[T]:
    """The items, with a bar that names the current one.

    Nothing is shown on ranks other than 0, nor unless standard error is a terminal or ``always`` is given.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield from items
        return
    with tqdm(items, disable=rank != 0 or not (always or sys.stderr.isatty())) as bar:
        for item in bar:
            bar.set_description_str(name(item))
            yield item
