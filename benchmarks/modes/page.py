"""The table and the picture of the runs, and their places in ``docs/`` and ``benchmarks/``."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchmpi_py.bench import results
from torchmpi_py.core import text_tables

LARGEST_GAIN = 1.5
"""Percentage points by which the mean accuracy of a mode may differ from that of its twin."""

BEGIN, END = "<!-- table: python benchmarks/modes -->\n", "<!-- end of the table -->\n"
NOTE = (
    "accuracy is that of the mode's result, the mean over the seeds; points are its difference from one process that "
    "takes the same samples per step; seconds are the median of the trainings; MB are what a rank sends, mean over the "
    "ranks, all of it through shared memory here"
)


@dataclasses.dataclass(frozen=True)
class Report:
    """What was run, where, and how it went; plain data, as stored."""

    settings: Mapping[str, Any]
    facts: Mapping[str, str]
    modes: Sequence[Mapping[str, str]]
    runs: Sequence[Mapping[str, Any]]

    def of(self, name: str, *, paused: bool = False) -> list[Mapping[str, Any]]:
        """The runs of a mode or a twin."""
        return [run for run in self.runs if run["mode"] == name and bool(run["pause_seconds"]) == paused]


@dataclasses.dataclass(frozen=True)
class Row:
    """A mode's figures. Accuracy in percent, ``gain`` in percentage points over its twin."""

    name: str
    origin: str
    command: str
    accuracy: float
    gain: float
    seconds: float
    paused_seconds: float | None
    num_bytes: float


def rows(report: Report) -> list[Row]:
    """The figures of all modes."""
    return [_row(report, mode) for mode in report.modes]


def _row(report: Report, mode: Mapping[str, str]) -> Row:
    even, paused = report.of(mode["name"]), report.of(mode["name"], paused=True)
    accuracy = 100 * statistics.mean(run["accuracy"][-1] for run in even)
    twin = 100 * statistics.mean(run["accuracy"][-1] for run in report.of(twin_name(mode["twin"])))
    command = f"torchmpirun -n {report.settings['ranks']} examples/{mode['program']} {mode['options']}".rstrip()
    return Row(
        mode["name"],
        mode["origin"],
        command,
        accuracy,
        accuracy - twin,
        statistics.median(run["seconds"][-1] for run in even),
        paused[0]["seconds"][-1] if paused else None,
        statistics.mean(run["num_bytes"] for run in even),
    )


def twin_name(options: str) -> str:
    """The name under which the runs of the twin with these options are stored."""
    return f"twin {options}".rstrip()


def table(report: Report) -> str:
    """The table in Markdown, in four columns, so that it fits a page."""
    header = ["strategy", "accuracy % (points)", "seconds (with a pause)", "MB per rank"]
    cells = [
        [
            row.name,
            f"{row.accuracy:.2f} ({round(row.gain, 2) + 0.0:+.2f})",
            f"{results.number(row.seconds)} ({_pause(row)})",
            results.number(row.num_bytes / 1e6),
        ]
        for row in rows(report)
    ]
    return text_tables.table(header, cells)


def _pause(row: Row) -> str:
    return "-" if row.paused_seconds is None else results.number(row.paused_seconds)


def render(report: Report) -> str:
    """The dated report in Markdown."""
    listed = "\n".join(f"- {name}: {fact}" for name, fact in (report.facts | report.settings).items())
    programs = "\n".join(f"- {row.name} ({row.origin}): `{row.command}`" for row in rows(report))
    return f"# Training strategies\n\n{listed}\n\n{table(report)}\n\nNote: {NOTE}.\n\n{programs}"


def insert(report: Report, docs: Path, picture: Path) -> None:
    """Put the table and the picture's name into a page, between its two marks."""
    text = docs.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path = os.path.relpath(picture, docs.parent)
    run = f"{report.facts['date']}: {report.settings['ranks']} ranks on {report.facts['cores']} cores"
    more = f"torch {report.facts['torch']}, {report.settings['seeds']} seeds, {report.settings['epochs']} epochs"
    note = f"Run of {run}, {more}\n([report]({path.removesuffix('.png')}.md))."
    docs.write_text(f"{before}{BEGIN}{table(report)}\n\n{note}\n\n![accuracy against seconds]({path})\n{END}{after}")


def draw(report: Report, file: Path) -> None:
    """The picture: accuracy against seconds, a small one for each mode; even, with a pause, and the twin."""
    from matplotlib.figure import Figure

    num_columns = 4
    num_rows = -(-len(report.modes) // num_columns)
    figure = Figure(figsize=(12, 2.1 * num_rows + 0.6), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, mode in zip(panels, report.modes, strict=False):
        for name, paused, style in (
            (twin_name(mode["twin"]), False, {"color": "0.7", "label": "one process"}),
            (mode["name"], False, {"color": "C0", "label": "even"}),
            (mode["name"], True, {"color": "C3", "linestyle": "--", "label": "the last rank pauses"}),
        ):
            for run in report.of(name, paused=paused)[:1]:
                panel.plot(run["seconds"], [100 * share for share in run["accuracy"]], **style)
        panel.set_title(mode["name"], fontsize=9)
        panel.grid(alpha=0.3)
    for panel in panels[len(report.modes) :]:
        panel.set_visible(False)
    panels[0].set_ylim(50, 100)
    panels[0].set_xscale("log")  # on all, as they share it
    figure.supxlabel("seconds of training")
    figure.supylabel("accuracy on the test set, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(file, dpi=100)


def facts() -> dict[str, str]:
    """The machine, and how busy it is now: the runs themselves are a load of as many as there are ranks."""
    return {
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load": ", ".join(f"{value:.1f}" for value in os.getloadavg()),
    }
