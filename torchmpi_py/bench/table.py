"""Reports as Markdown that is also aligned for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torchmpi_py.bench.contestants import COPY, DEVICE_COPY, GLOO, HOST_COPY, LIMITS, RAW_MPI
from torchmpi_py.bench.results import Report, Row

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


def _row(report: Report, row: Row, references: Sequence[str]) -> list[str]:
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
