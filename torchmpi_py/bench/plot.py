"""The command ``plot``: a report of ``run`` or ``compare`` as a picture. The only module that imports matplotlib.

Latency and algorithm bandwidth against size, warm buffers above cold ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchmpi_py.bench import UsageError
from torchmpi_py.bench.candidates import COPY, DEVICE_COPY, GLOO, HOST_COPY, RAW_MPI, WIRE
from torchmpi_py.bench.results import Report, ResultRow, check_outputs, load
from torchmpi_py.core.mpi_api import MPI

_REFERENCE_STYLES: dict[str, dict[str, Any]] = {
    RAW_MPI: {"color": "0.25", "linestyle": "--", "marker": "s"},
    GLOO: {"color": "0.5", "linestyle": "-.", "marker": "^"},
    COPY: {"color": "0.65", "linestyle": ":", "marker": None},
    DEVICE_COPY: {"color": "0.65", "linestyle": ":", "marker": None},
    HOST_COPY: {"color": "0.4", "linestyle": ":", "marker": "x"},
    WIRE: {"color": "black", "linestyle": ":", "marker": None},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``plot``."""
    parser.add_argument("json", type=Path, metavar="FILE.json")
    parser.add_argument("plot", type=Path, metavar="FILE.png")


def main(options: argparse.Namespace) -> None:
    """Draw a stored report. UsageError without a report or without matplotlib."""
    report = load(options.json)
    if problem := _missing():
        raise UsageError(problem)
    draw(report, options.plot)


def check(comm: MPI.Comm, path: Path) -> None:
    """Check, before anything is measured, that rank 0 can draw to ``path``. UsageError on every rank. Collective."""
    check_outputs(comm, path, problem=_missing())


def _missing() -> str:
    """Why nothing can be drawn here, or ""."""
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    return "" if has_matplotlib else "drawing needs matplotlib: pip install matplotlib"


def draw(report: Report, path: Path) -> None:
    """Write a picture of ``report``: a row of two panels for warm and for cold buffers, a line per candidate.

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
    """One panel: ``value`` of each row against its bytes."""
    for what, marker in zip(dict.fromkeys(row.what for row in rows), itertools.cycle("oDvPX*<>")):
        line = [(row.num_bytes, value(row)) for row in rows if row.what == what]
        style: dict[str, Any] = _REFERENCE_STYLES.get(what, {"marker": marker, "linewidth": 1.8, "alpha": 0.8})
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
