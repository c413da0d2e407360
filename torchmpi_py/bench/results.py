"""What was measured, what follows from it, and how it is stored.

Reports as Markdown that is also aligned for the terminal.

Reports as pictures: latency and algorithm bandwidth against size. The only file that imports matplotlib.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmpi_py.bench import UsageError
from torchmpi_py.bench.candidates import COPY, DEVICE_COPY, GLOO, HOST_COPY, LIMITS, RAW_MPI
from torchmpi_py.bench.cases import VERBS

_FORMAT = "torchmpi_py.bench collective 1"


@dataclasses.dataclass(frozen=True)
class ResultRow:
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
    rows: list[ResultRow]
    device: str = "cpu"

    def bus_bytes_per_second(self, row: ResultRow) -> float:
        """Bus bandwidth: what the hardware has to move, whatever the verb and the number of ranks."""
        return row.bytes_per_second * VERBS[self.verb].bus_factor(self.num_ranks)

    def times_faster(self, row: ResultRow, than: str) -> float | None:
        """Time of the contestant called ``than`` at the same size and buffers / time of ``row``; None if not there."""
        key = (row.num_bytes, row.buffers, than)
        seconds = (other.median_seconds for other in self.rows if (other.num_bytes, other.buffers, other.what) == key)
        return next((other / row.median_seconds for other in seconds), None)


def make_row(num_bytes: int, what: str, buffers: str, seconds: Sequence[float]) -> ResultRow:
    """The statistics of some times, in seconds."""
    return ResultRow(num_bytes, what, buffers, quantile(seconds, 0.5), quantile(seconds, 0.99), len(seconds))


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
        return Report(**stored | {"rows": [ResultRow(**row) for row in stored["rows"]]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a report of run or compare --json: {error}") from error


_REFERENCES = {
    RAW_MPI: "x raw MPI",
    GLOO: "x gloo",
    f"{GLOO}, async": "x gloo async",
    COPY: "x limit",
    DEVICE_COPY: "x device copy",
    HOST_COPY: "x host copy",
}


def render(report: Report) -> str:
    """The facts, the remarks and the table."""
    op = f" ({report.op})" if report.op else ""
    where = "" if report.device == "cpu" else f" on {report.device}"
    return document(f"{report.verb}{op} of {report.dtype}{where}", report.facts, report.notes, *_cells(report))


def document(
    title: str,
    facts: Mapping[str, str],
    notes: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """A title, facts as a list, a table, and the remarks below it."""
    listed = [f"- {name}: {fact}" for name, fact in facts.items()]
    parts = [f"# {title}", "\n".join(listed), table(header, rows), "\n".join(f"Note: {note}." for note in notes)]
    return "\n\n".join(part for part in parts if part)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns; the ones of numbers are on the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    is_number = [all(_is_number(row[index]) for row in rows) for index in range(len(header))]
    rule = ["-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, is_number, strict=True)]
    lines = [
        [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        for row in (header, *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def number(value: float | None) -> str:
    """Three significant digits, but at most five decimals and no exponent; a dash for nothing."""
    if value is None:
        return "-"
    rounded = float(f"{value:.3g}")
    exponent = math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{value:.{max(0, min(5, 2 - exponent))}f}"


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).replace("-", "", 1).isdigit() or cell == "-"


def _cells(report: Report) -> tuple[list[str], list[list[str]]]:
    measured = {row.what for row in report.rows}
    references = [name for name in _REFERENCES if name in measured and len(measured) > 1]
    header = ["bytes", "what", "buffers", "us median", "us p99", "algbw GB/s", "busbw GB/s"]
    rows = [_row(report, row, references) for row in report.rows]
    return [*header, *(_REFERENCES[name] for name in references)], rows


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


_GREY: dict[str, dict[str, Any]] = {
    RAW_MPI: {"color": "0.25", "linestyle": "--", "marker": "s"},
    GLOO: {"color": "0.5", "linestyle": "-.", "marker": "^"},
    COPY: {"color": "0.65", "linestyle": ":", "marker": None},
    DEVICE_COPY: {"color": "0.65", "linestyle": ":", "marker": None},
    HOST_COPY: {"color": "0.4", "linestyle": ":", "marker": "x"},
}


def draw(report: Report, path: Path) -> None:
    """Write a picture of ``report``: a row of two panels for warm and for cold buffers, a line per contestant.

    UsageError for a file name whose ending matplotlib does not know, or that cannot be written.
    """
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.buffers for row in report.rows))
    figure = Figure(figsize=(12, 4.6 * len(kinds)), layout="constrained")
    op = f" ({report.op})" if report.op else ""
    machine = report.facts.get("processor" if report.device == "cpu" else "GPUs", "")
    figure.suptitle(f"{report.verb}{op} of {report.dtype}, {report.num_ranks} ranks, {machine}")
    axes = figure.subplots(len(kinds), 2, squeeze=False)
    for (latency, bandwidth), kind in zip(axes, kinds, strict=True):
        rows = [row for row in report.rows if row.buffers == kind]
        _panel(latency, rows, f"{kind} buffers: time (us)", lambda row: row.median_seconds * 1e6)
        _panel(bandwidth, rows, f"{kind} buffers: algorithm bandwidth (GB/s)", lambda row: row.bytes_per_second / 1e9)
        latency.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot draw to {path}: {error}") from error


def _panel(axes: Any, rows: list[ResultRow], title: str, value: Callable[[ResultRow], float]) -> None:
    for what, marker in zip(dict.fromkeys(row.what for row in rows), itertools.cycle("oDvPX*<>")):
        line = [(row.num_bytes, value(row)) for row in rows if row.what == what]
        style: dict[str, Any] = _GREY.get(what, {"marker": marker, "linewidth": 1.8, "alpha": 0.8})
        axes.plot(*zip(*line, strict=True), label=what, markersize=5, **style)
    axes.set(yscale="log", xlabel="bytes", title=title)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_short)
    axes.grid(visible=True, which="major", color="0.9")


def _short(num_bytes: float, _: object) -> str:
    """A tick's label: 4, 64K, 1M."""
    for unit in ("", "K", "M"):
        if num_bytes < 1024:
            return f"{num_bytes:g}{unit}"
        num_bytes /= 1024
    return f"{num_bytes:g}G"
