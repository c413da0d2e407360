"""Draw a report that ``bench run`` or ``bench compare`` has stored with ``--json``.

    python benchmarks/plot.py report.json report.png

A picture has latency and algorithm bandwidth against size, warm buffers above cold ones. Every series is in the legend,
beside the panels; versions and date are in the title.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from torchmpi_py.bench import UsageError
from torchmpi_py.bench.buffers import format_size
from torchmpi_py.bench.candidates import COPY, DEVICE_COPY, GLOO, HOST_COPY, RAW_MPI, WIRE
from torchmpi_py.bench.results import Report, ResultRow, load

_REFERENCE_STYLES: dict[str, dict[str, Any]] = {
    RAW_MPI: {"color": "0.25", "linestyle": "--", "marker": "s"},
    GLOO: {"color": "0.5", "linestyle": "-.", "marker": "^"},
    COPY: {"color": "0.65", "linestyle": ":", "marker": "."},
    DEVICE_COPY: {"color": "0.65", "linestyle": ":", "marker": "."},
    HOST_COPY: {"color": "0.4", "linestyle": ":", "marker": "x"},
    WIRE: {"color": "black", "linestyle": ":", "marker": "+"},
}
_MARKERS = "oDvPX*<>"
_VERSIONS = ("torchmpi_py", "torch", "MPI", "CUDA")


def main() -> None:
    """Draw the report that the command line names; exit with a message where that is not possible."""
    parser = argparse.ArgumentParser(description="Draw a report of the bench.")
    parser.add_argument("json", type=Path, metavar="FILE.json", help="a report that was stored with --json")
    parser.add_argument("plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    try:
        draw(load(options.json), options.plot)
    except UsageError as error:
        sys.exit(str(error))


def draw(report: Report, path: Path) -> None:
    """Write a picture of ``report``: a row of two panels for warm and for cold buffers, a line per candidate.

    UsageError for a file name whose ending matplotlib does not know, or that cannot be written.
    """
    kinds = list(dict.fromkeys(row.buffers for row in report.rows))
    figure = Figure(figsize=(13, 4.6 * len(kinds)), layout="constrained")
    machine = report.facts.get("processor" if report.device == "cpu" else "GPUs", "")
    found = [(name, report.facts[name]) for name in _VERSIONS if name in report.facts]
    versions = ", ".join(version if name == "MPI" else f"{name} {version}" for name, version in found)
    about = "; ".join(filter(None, (versions, report.facts.get("date"))))
    figure.suptitle(f"{report.title}, {report.num_ranks} ranks, {machine}\n{about}", fontsize=11)
    axes = figure.subplots(len(kinds), 2, squeeze=False)
    for (latency, bandwidth), kind in zip(axes, kinds, strict=True):
        rows = [row for row in report.rows if row.buffers == kind]
        _panel(latency, rows, f"{kind} buffers: time (us)", lambda row: row.median_seconds * 1e6)
        _panel(bandwidth, rows, f"{kind} buffers: algorithm bandwidth (GB/s)", lambda row: row.bytes_per_second / 1e9)
    legends = [latency.get_legend_handles_labels() for latency, _ in axes]
    series = {label: line for lines, labels in legends for line, label in zip(lines, labels, strict=True)}
    figure.legend(list(series.values()), list(series), loc="outside right upper", fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot draw to {path}: {error}") from error


def _panel(axes: Any, rows: list[ResultRow], title: str, value: Callable[[ResultRow], float]) -> None:
    """One panel: ``value`` of each row against its bytes."""
    names = list(dict.fromkeys(row.what for row in rows))
    for number, (what, marker) in enumerate(zip(names, itertools.cycle(_MARKERS))):
        line = [(row.num_bytes, value(row)) for row in rows if row.what == what]
        # A line that lies on another one is thinner, and its marker smaller: none hides the ones below it.
        on_top = number / len(names)
        own: dict[str, Any] = {"marker": marker, "linewidth": 3.0 - 1.8 * on_top, "markersize": 9 - 4 * on_top}
        style = {"markersize": 5} | _REFERENCE_STYLES[what] if what in _REFERENCE_STYLES else own
        axes.plot(*zip(*line, strict=True), label=what, **style)
    axes.set(yscale="log", xlabel="size", title=title)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda num_bytes, _: format_size(num_bytes))
    axes.tick_params(axis="x", labelsize="small")
    axes.grid(visible=True, which="major", color="0.9")


if __name__ == "__main__":
    main()
