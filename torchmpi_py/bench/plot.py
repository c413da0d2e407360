"""The command ``plot``: stored measurements as a picture. The only module that imports matplotlib.

Of a report of ``run`` or ``compare``: latency and algorithm bandwidth against size, warm buffers above cold ones. Of
the ``--curve`` files of examples: accuracy against seconds, and seconds against ranks where their numbers differ. Every
series is in the legend, beside the panels; versions and date are in the title.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchmpi_py import trusted_files
from torchmpi_py.bench import UsageError
from torchmpi_py.bench.candidates import COPY, DEVICE_COPY, GLOO, HOST_COPY, RAW_MPI, WIRE
from torchmpi_py.bench.results import MOST_BYTES, Report, ResultRow, check_outputs, load
from torchmpi_py.core.mpi_api import MPI

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


@dataclasses.dataclass(frozen=True)
class TrainingCurve:
    """What an example wrote with ``--curve``: seconds and accuracy after each epoch, and at the end."""

    name: str  # of the file
    program: str
    ranks: int
    seconds: Sequence[float]
    accuracy: Sequence[float]
    versions: str
    date: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``plot``."""
    parser.add_argument("json", type=Path, nargs="+", metavar="FILE.json", help="a report; or curves of examples")
    parser.add_argument("plot", type=Path, metavar="FILE.png")


def main(options: argparse.Namespace) -> None:
    """Draw a stored report, or curves. UsageError without them or without matplotlib."""
    curves = [load_curve(path) for path in options.json]
    reports = [load(path) for path, curve in zip(options.json, curves, strict=True) if curve is None]
    if len(reports) > 1 or (reports and len(curves) > 1):
        raise UsageError("a picture is of one report of run or compare, or of curves alone: give these")
    if problem := _missing():
        raise UsageError(problem)
    if reports:
        draw(reports[0], options.plot)
    else:
        draw_curves([curve for curve in curves if curve is not None], options.plot)


def check(comm: MPI.Comm, path: Path) -> None:
    """Check, before anything is measured, that rank 0 can draw to ``path``. UsageError on every rank. Collective."""
    check_outputs(comm, path, problem=_missing())


def _missing() -> str:
    """Why nothing can be drawn here, or ""."""
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    return "" if has_matplotlib else "drawing needs matplotlib: pip install matplotlib"


def load_curve(path: Path) -> TrainingCurve | None:
    """The curve in a file; None where the file holds something else."""
    try:
        stored = trusted_files.read_json(path, MOST_BYTES, owners=None)
        fields = {field.name: stored[field.name] for field in dataclasses.fields(TrainingCurve)[1:]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return TrainingCurve(path.stem, **fields)


def draw(report: Report, path: Path) -> None:
    """Write a picture of ``report``: a row of two panels for warm and for cold buffers, a line per candidate.

    UsageError for a file name whose ending matplotlib does not know, or that cannot be written.
    """
    from matplotlib.figure import Figure

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
    _finish(figure, [latency for latency, _ in axes], path)


def draw_curves(curves: Sequence[TrainingCurve], path: Path) -> None:
    """Write a picture of curves: accuracy against seconds, and seconds against ranks of programs that ran on several.

    UsageError as ``draw``.
    """
    from matplotlib.figure import Figure

    by_program: dict[str, dict[int, float]] = {}
    for curve in curves:
        by_program.setdefault(curve.program, {})[curve.ranks] = curve.seconds[-1]
    scaling = {program: times for program, times in by_program.items() if len(times) > 1}
    figure = Figure(figsize=(12 if scaling else 8, 4.6), layout="constrained")
    versions = ", ".join(sorted({f"{curve.versions}; {curve.date}" for curve in curves}))
    figure.suptitle(f"{', '.join(by_program)}: accuracy on the test set\n{versions}", fontsize=11)
    left, *right = figure.subplots(1, 2 if scaling else 1, squeeze=False)[0]
    for curve, marker in zip(curves, itertools.cycle(_MARKERS)):
        label = f"{curve.name}: {curve.ranks} rank{'s' * (curve.ranks > 1)}"
        left.plot(curve.seconds, [100 * each for each in curve.accuracy], label=label, marker=marker, markersize=4)
    left.set(xlabel="seconds of training", title="accuracy (%)")
    for axes in right:
        _draw_scaling(axes, scaling, len(curves))
    for axes in (left, *right):
        axes.grid(visible=True, color="0.9")
    _finish(figure, [left, *right], path)


def _draw_scaling(axes: Any, scaling: dict[str, dict[int, float]], num_curves: int) -> None:
    # Colours go on after those of the curves, which are in the same legend.
    for number, (program, times) in enumerate(scaling.items(), num_curves):
        ranks = sorted(times)
        axes.plot(ranks, [times[each] for each in ranks], f"C{number}s-", label=f"{program}, measured")
        ideal = [times[ranks[0]] * ranks[0] / each for each in ranks]
        axes.plot(ranks, ideal, label=f"{program}, in proportion", linestyle=":", color="0.4", marker=".")
    axes.set(xlabel="ranks", title="seconds of the whole training", ylim=(0, None))
    axes.set_xticks(sorted({each for times in scaling.values() for each in times}))


def _finish(figure: Any, labelled: Sequence[Any], path: Path) -> None:
    """Put the legend of all series beside the panels, and write the file."""
    found = {label: line for axes in labelled for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside right upper", fontsize="small")
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
