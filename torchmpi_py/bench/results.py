"""What was measured, what follows from it, and how it is stored."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchmpi_py.bench.errors import UsageError
from torchmpi_py.bench.verbs import VERBS

_FORMAT = "torchmpi_py.bench collective 1"


@dataclasses.dataclass(frozen=True)
class Row:
    """One contestant at one size: statistics of the times of its calls, each that of the slowest rank."""

    num_bytes: int
    what: str
    buffers: str  # "warm" or "cold"
    median_seconds: float
    p99_seconds: float
    num_turns: int

    @property
    def bytes_per_second(self) -> float:
        """Algorithm bandwidth."""
        return self.num_bytes / self.median_seconds


@dataclasses.dataclass(frozen=True)
class Report:
    """A run of ``run`` or ``compare``: the task, facts about the machine, remarks, and the rows in their order."""

    verb: str
    dtype: str
    op: str  # "" where nothing is reduced
    num_ranks: int
    facts: dict[str, str]
    notes: list[str]
    rows: list[Row]
    device: str = "cpu"

    def bus_bytes_per_second(self, row: Row) -> float:
        """Bus bandwidth: what the hardware has to move, whatever the verb and the number of ranks."""
        return row.bytes_per_second * VERBS[self.verb].bus_factor(self.num_ranks)

    def times_faster(self, row: Row, than: str) -> float | None:
        """Time of the contestant called ``than`` at the same size and buffers / time of ``row``; None if not there."""
        key = (row.num_bytes, row.buffers, than)
        seconds = (other.median_seconds for other in self.rows if (other.num_bytes, other.buffers, other.what) == key)
        return next((other / row.median_seconds for other in seconds), None)


def make_row(num_bytes: int, what: str, buffers: str, seconds: Sequence[float]) -> Row:
    """The statistics of some times, in seconds."""
    return Row(num_bytes, what, buffers, quantile(seconds, 0.5), quantile(seconds, 0.99), len(seconds))


def quantile(seconds: Sequence[float], part: float) -> float:
    """The smallest time that at least ``part`` of all times do not exceed."""
    return sorted(seconds)[max(0, math.ceil(part * len(seconds)) - 1)]


def store(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps({"format": _FORMAT} | dataclasses.asdict(report), indent=1) + "\n")


def load(path: Path) -> Report:
    """Read a report. UsageError if the file is not one."""
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored.pop("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        return Report(**stored | {"rows": [Row(**row) for row in stored["rows"]]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a report of run or compare --json: {error}") from error
