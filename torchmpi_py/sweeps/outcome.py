"""How experiments ended: one row each, as a table to print, as CSV, and the best of them."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchmpi_py import trusted_files
from torchmpi_py.core import text_tables

FINISHED: Literal["finished"] = "finished"
STOPPED: Literal["stopped"] = "stopped"
FAILED: Literal["failed"] = "failed"
_MOST_CHARACTERS = 60  # of a cell in the printed table


@dataclass(frozen=True)
class Experiment:
    """One configuration and how it ended.

    ``number``: its place among the configurations, from 0. ``state``: "finished", "stopped" (early) or "failed".
    ``value``: what ``train_fn`` returned on rank 0 of the group; of a stopped one the last value reported; None of a
    failed one. ``seconds``: how long it took; ``began``: when, in seconds since 1970. ``group``: which group of ranks
    ran it. ``log``: the file with its output.
    """

    number: int
    configuration: Any
    state: Literal["finished", "stopped", "failed"]
    value: Any
    error: str
    seconds: float
    began: float
    seed: int
    group: int
    log: str

    def cells(self) -> dict[str, Any]:
        """The row of this experiment, by column: keys of configuration and value that are mappings are columns."""
        row: dict[str, Any] = {"number": self.number, "state": self.state}
        for name, content in (("configuration", self.configuration), ("value", self.value)):
            parts = content if isinstance(content, Mapping) else {} if content is None else {name: content}
            for key, part in parts.items():
                row[f"{name}.{key}" if str(key) in row or str(key) in _COLUMNS else str(key)] = part
        last = (round(self.seconds, 3), self.group, self.seed, self.error)
        return row | dict(zip(_COLUMNS, last, strict=True))


_COLUMNS = ("seconds", "group", "seed", "error")


class Results(tuple[Experiment, ...]):
    """All experiments of a sweep, by number; ``str`` is a table with a line for each."""

    def best(self, key: str | Callable[[Any], float] | None = None, *, largest: bool = True) -> Experiment:
        """The experiment with the largest value (or the smallest), stopped ones included.

        ``key``: what of the value counts: a key of a mapping, or a function; None: the value itself. NaN is no value,
        nor is what a stopped one has reported if ``key`` does not fit. ValueError if there is none.
        """

        def amount(row: Experiment) -> float:
            try:
                return float(key(row.value) if callable(key) else row.value if key is None else row.value[key])
            except (TypeError, ValueError, LookupError, AttributeError):
                if row.state == STOPPED:  # it has reported a number, say, where train_fn returns a mapping
                    return math.nan
                raise

        amounts = [(amount(row), row) for row in self if row.state != FAILED and row.value is not None]
        comparable = [pair for pair in amounts if not math.isnan(pair[0])]
        if not comparable:
            raise ValueError(f"none of {len(self)} experiments has a value that can be compared")
        return (max if largest else min)(comparable, key=lambda pair: pair[0])[1]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a file; a file that is there is replaced at once.

        A spreadsheet takes a cell that begins with "=", "+", "-" or "@" for a formula. Such a text gets a "'" before
        it, unless it is a number.
        """
        trusted_files.refuse_others(path)
        part = Path(f"{path}.{os.getpid()}.part")
        columns = self._columns()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(trusted_files.open_file(part, flags), "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(map(_csv_cell, columns))
            writer.writerows(
                [_csv_cell(cells.get(name)) for name in columns] for cells in (row.cells() for row in self)
            )
        part.replace(path)

    def _columns(self) -> list[str]:
        """The columns of all rows; error is the last."""
        names = dict.fromkeys(name for row in self for name in row.cells())
        return [name for name in names if name not in _COLUMNS] + [name for name in _COLUMNS if name in names]

    def __str__(self) -> str:
        columns = self._columns()
        rows = [[_shown(cells.get(name, "")) for name in columns] for cells in (row.cells() for row in self)]
        return text_tables.table(columns, rows) if rows else "no experiments"


def _csv_cell(value: Any) -> str:
    text = _cut(value, 1000)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        complex(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str("" if value is None else value)
    text = " ".join(text.split())
    return _cut(text, _MOST_CHARACTERS)


def _cut(value: Any, most: int) -> str:
    """The value as text, of at most so many characters."""
    text = str("" if value is None else value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
