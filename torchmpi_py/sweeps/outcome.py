"""The outcomes of experiments: one row each, a table to print, a CSV file, and the best experiment."""

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
_MOST_CHARACTERS = 60  # maximum length of a cell in the printed table


@dataclass(frozen=True)
class Experiment:
    """The outcome of one configuration, a row of the results of ``mpi.experiments``.

    Attributes:
        number (int): index of the configuration, from 0.
        configuration (object): the argument of ``train_fn``.
        state (str): "finished", "stopped" (early) or "failed".
        value (object): the result of ``train_fn`` on rank 0 of the group; the last reported value if the experiment was
            stopped, and None if it failed.
        error (str): the error of a failed experiment, otherwise empty.
        seconds (float): duration.
        began (float): start time, in seconds since 1970.
        seed (int): seed of the random generators.
        group (int): index of the group of ranks that ran the experiment.
        log (str): path of the file with the output.
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
        """Return the row of this experiment in the table. Each key of a mapping becomes a separate column.

        Returns:
            A dictionary from the names of the columns to the cells.
        """
        row: dict[str, Any] = {"number": self.number, "state": self.state}
        for name, content in (("configuration", self.configuration), ("value", self.value)):
            parts = content if isinstance(content, Mapping) else {} if content is None else {name: content}
            for key, part in parts.items():
                row[f"{name}.{key}" if str(key) in row or str(key) in _COLUMNS else str(key)] = part
        last = (round(self.seconds, 3), self.group, self.seed, self.error)
        return row | dict(zip(_COLUMNS, last, strict=True))


_COLUMNS = ("seconds", "group", "seed", "error")


class Results(tuple[Experiment, ...]):
    """All experiments of a sweep, a tuple in the order of the configurations.

    ``str`` returns a table with one row per experiment.
    """

    def best(self, key: str | Callable[[Any], float] | None = None, *, largest: bool = True) -> Experiment:
        """Return the experiment with the largest or the smallest value, including stopped experiments.

        Failed experiments and NaN values are ignored. A stopped experiment is ignored if ``key`` is not applicable to
        the number that the experiment has reported.

        Args:
            key (str or callable): key of the value, if the value is a mapping, or a function of the value that returns
                a number. Default None, the value itself.
            largest (bool): whether the largest value is the best. Default True.

        Returns:
            The best experiment.

        Raises:
            ValueError: no experiment has a value that can be compared.
            TypeError, LookupError: ``key`` is not applicable to the value of a finished experiment.
        """

        def amount(row: Experiment) -> float:
            try:
                return float(key(row.value) if callable(key) else row.value if key is None else row.value[key])
            except (TypeError, ValueError, LookupError, AttributeError):
                # A stopped experiment has reported a number, but the key may need a mapping from train_fn.
                if row.state == STOPPED:
                    return math.nan
                raise

        amounts = [(amount(row), row) for row in self if row.state != FAILED and row.value is not None]
        comparable = [pair for pair in amounts if not math.isnan(pair[0])]
        if not comparable:
            raise ValueError(f"no experiment of {len(self)} has a value to compare; print the results to see why")
        return (max if largest else min)(comparable, key=lambda pair: pair[0])[1]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a CSV file, and replace an existing file atomically.

        A "'" is put before a text that starts with "=", "+", "-", "@", a tab or a carriage return, unless the text is a
        number. Otherwise a spreadsheet would run the text as a formula.

        Args:
            path (str or path): file to write.

        Raises:
            OSError: the file cannot be written, or belongs to another user.
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
        """Return the names of all columns; ``error`` is the last."""
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
    """Return the value as a text of at most ``most`` characters."""
    text = str("" if value is None else value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
