"""Reports of measurements: their rows, the bandwidths and ratios derived from the rows, JSON files, and Markdown."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmpi_py import trusted_files
from torchmpi_py.bench import UsageError
from torchmpi_py.bench.buffers import format_size
from torchmpi_py.bench.candidates import COPY, DEVICE_COPY, GLOO, HOST_COPY, LIMITS, RAW_MPI, WIRE
from torchmpi_py.bench.cases import VERBS
from torchmpi_py.core import text_tables
from torchmpi_py.core.mpi_api import MPI

COLLECTIVE = "torchmpi_py.bench collective 1"
"""The format of a report of ``run`` or ``compare``."""

MOST_BYTES = 1 << 28  # size limit of a report's file

# Reference candidates. Each has a column that shows the reference's time divided by the row's time.
_REFERENCES = {
    RAW_MPI: "x raw MPI",
    GLOO: "x gloo",
    f"{GLOO}, async": "x gloo async",
    COPY: "x limit",
    DEVICE_COPY: "x device copy",
    HOST_COPY: "x host copy",
}
PEERS = RAW_MPI, GLOO, f"{GLOO}, async"


@dataclasses.dataclass(frozen=True)
class ResultRow:
    """Statistics of the timed calls of one candidate at one size. The slowest rank determines the time of a call."""

    num_bytes: int
    what: str
    buffers: str  # "warm" or "cold"
    median_seconds: float
    p99_seconds: float
    num_turns: int
    time_to_floor: float | None = None  # None for limits, and without --link

    @property
    def bytes_per_second(self) -> float:
        """Algorithm bandwidth."""
        return self.num_bytes / self.median_seconds


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of ``run`` or ``compare``: the task, facts about the machine, notes, and the rows in their order."""

    verb: str
    dtype: str
    op: str  # "" if the collective does not reduce
    num_ranks: int
    facts: dict[str, str]
    notes: list[str]
    rows: list[ResultRow]
    device: str = "cpu"

    def bus_bytes_per_second(self, row: ResultRow) -> float:
        """Return the bus bandwidth, which is comparable across collectives and numbers of ranks (see ``cases``)."""
        return row.bytes_per_second * VERBS[self.verb].bus_factor(self.num_ranks)

    @property
    def title(self) -> str:
        """A short description of the task."""
        op = f" ({self.op})" if self.op else ""
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.verb}{op} of {self.dtype}{where}"

    def seconds(self, num_bytes: int, buffers: str, what: str) -> float | None:
        """Return the median time of the candidate ``what``, or None if this candidate was not measured."""
        key = (num_bytes, buffers, what)
        return next((row.median_seconds for row in self.rows if (row.num_bytes, row.buffers, row.what) == key), None)

    def times_faster(self, row: ResultRow, than: str) -> float | None:
        """Return (time of the candidate ``than`` at the same size and buffers) / (time of ``row``).

        Return None if ``than`` was not measured at this size with these buffers.
        """
        seconds = self.seconds(row.num_bytes, row.buffers, than)
        return None if seconds is None else seconds / row.median_seconds


def make_row(num_bytes: int, what: str, buffers: str, seconds: Sequence[float]) -> ResultRow:
    """Return a row with the statistics of times in seconds."""
    return ResultRow(num_bytes, what, buffers, quantile(seconds, 0.5), quantile(seconds, 0.99), len(seconds))


def quantile(seconds: Sequence[float], part: float) -> float:
    """Return the smallest time that at least a fraction ``part`` of all times does not exceed."""
    return sorted(seconds)[max(0, math.ceil(part * len(seconds)) - 1)]


def check_output(comm: MPI.Comm, path: Path | None) -> None:
    """Raise UsageError on every rank if rank 0 cannot write to ``path``.

    All ranks of ``comm`` must call this function, before the measurement starts.
    """
    if problem := comm.bcast(unwritable(path)):
        raise UsageError(problem)


def unwritable(path: Path | None) -> str:
    """Return the reason why this process cannot write to ``path``, or "" if it can."""
    if path is None or os.access(path.parent, os.W_OK):
        return ""
    return f"cannot write {path}: {path.parent} is not a writable folder; pass another file to --json"


def publish(rank: int, text: str, format_name: str, report: Any, path: Path | None) -> None:
    """Print ``text`` on rank 0, and store the dataclass ``report`` at ``path`` if ``path`` is not None."""
    if rank == 0:
        print(text, flush=True)
        if path is not None:
            store(format_name, report, path)


def store(format_name: str, report: Any, path: Path) -> None:
    """Write a dataclass as JSON, with the name of its format."""
    path.write_text(json.dumps({"format": format_name} | dataclasses.asdict(report), indent=1) + "\n")


def load(path: Path) -> Report:
    """Read a report of ``run`` or ``compare``. Raise UsageError if the file does not contain such a report."""
    try:
        stored: dict[str, Any] = trusted_files.read_json(path, MOST_BYTES, owners=None)
        if stored.pop("format") != COLLECTIVE:
            raise ValueError(f"its format is not {COLLECTIVE!r}")
        return Report(**stored | {"rows": [ResultRow(**row) for row in stored["rows"]]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot read {path} as a report that run or compare wrote with --json: {error}") from error


def summary(report: Report) -> str:
    """Return a line for each kind of buffers: the fastest candidate for each size, and its ratios to peers and limits.

    A limit does not count as a candidate. With a single candidate the summary is empty.
    """
    lines = []
    for kind in dict.fromkeys(row.buffers for row in report.rows):
        rows = [row for row in report.rows if row.buffers == kind and row.what not in LIMITS]
        if len({row.what for row in rows}) < 2:
            continue
        by_size: dict[int, list[ResultRow]] = {}
        for row in sorted(rows, key=lambda row: row.median_seconds):
            by_size.setdefault(row.num_bytes, []).append(row)
        lines.append(
            f"Fastest, {kind} buffers: {'; '.join(_winner(report, by_size[size]) for size in sorted(by_size))}."
        )
    return "\n".join(lines)


def _winner(report: Report, rows: Sequence[ResultRow]) -> str:
    """Describe the fastest row of a size. If a peer is the fastest, also describe this package's fastest row."""
    ours = next((row for row in rows if row.what not in PEERS), rows[0])
    shown = [rows[0]] if ours is rows[0] else [rows[0], ours]
    return f"{format_size(rows[0].num_bytes)} " + ", our fastest: ".join(_in_short(report, row) for row in shown)


def _in_short(report: Report, row: ResultRow) -> str:
    ratios = {name: report.times_faster(row, name) for name in _REFERENCES if name != row.what}
    texts = [f"{number(ratio)} {_REFERENCES[name]}" for name, ratio in ratios.items() if ratio is not None]
    return row.what + (f" ({', '.join(texts)})" if texts else "")


def render(report: Report) -> str:
    """Return the report as text: the facts, the table, the notes and the summary."""
    text = document(report.title, report.facts, report.notes, *_cells(report))
    return "\n\n".join(filter(None, (text, summary(report))))


def document(
    title: str, facts: Mapping[str, str], notes: Sequence[str], header: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Return a Markdown document: a title, facts as a list, a table, and the notes below the table."""
    listed = [f"- {name}: {fact}" for name, fact in facts.items()]
    parts = [
        f"# {title}",
        "\n".join(listed),
        text_tables.table(header, rows),
        "\n".join(f"Note: {note}." for note in notes),
    ]
    return "\n\n".join(part for part in parts if part)


def number(value: float | None) -> str:
    """Return a number as text, or "-" for None.

    Numbers below 1000 have three significant digits and at most five decimals. Larger numbers have no decimals.
    """
    if value is None:
        return "-"
    rounded = float(f"{value:.3g}")
    exponent = math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{value:.{max(0, min(5, 2 - exponent))}f}"


def _cells(report: Report) -> tuple[list[str], list[list[str]]]:
    measured = {row.what for row in report.rows}
    references = [name for name in _REFERENCES if name in measured and len(measured) > 1]
    header = ["bytes", "what", "buffers", "us median", "us p99", "algbw GB/s", "busbw GB/s"]
    of_wire = ["time/floor"] if WIRE in measured else []
    rows = [[*_row(report, row, references), *(number(row.time_to_floor) for _ in of_wire)] for row in report.rows]
    return [*header, *(_REFERENCES[name] for name in references), *of_wire], rows


def _row(report: Report, row: ResultRow, references: Sequence[str]) -> list[str]:
    bus = None if row.what in LIMITS else report.bus_bytes_per_second(row) / 1e9
    return [
        str(row.num_bytes),
        row.what,
        row.buffers,
        number(row.median_seconds * 1e6),
        number(row.p99_seconds * 1e6),
        number(row.bytes_per_second / 1e9),
        number(bus),
        *(number(report.times_faster(row, name)) for name in references),
    ]
