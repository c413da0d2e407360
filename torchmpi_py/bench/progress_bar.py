"""A progress bar on standard error of rank 0, if tqdm is installed. Other modules of the bench do not import tqdm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def shown(items: Sequence[T], name: Callable[[T], str], *, rank: int, always: bool = False) -> Iterator[T]:
    """Yield the items, and show a progress bar with the name of the current item.

    Only rank 0 shows the bar, if standard error is a terminal or ``always`` is set.
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
