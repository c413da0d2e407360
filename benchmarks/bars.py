"""Draw the bar chart of README and docs/performance.md from a report that ``bench compare`` has stored with ``--json``.

python benchmarks/bars.py benchmarks/allreduce_2ranks_2cores_20261127.json docs/img/allreduce_times.svg

A panel per size, each with its own linear axis from zero. The background is opaque, so that the chart can be read on a
light and on a dark page.
"""

import pathlib
import sys

import matplotlib as mpl
from matplotlib.figure import Figure

from torchmpi_py.bench.buffers import format_size
from torchmpi_py.bench.candidates import GLOO, RAW_MPI
from torchmpi_py.bench.results import load

SIZES = (1 << 20, 16 << 20, 64 << 20)
BARS = {  # from top to bottom: the candidate, its label, its colour
    GLOO: ("gloo", "#9aa3ad"),
    RAW_MPI: ("raw mpi4py", "#6b7580"),
    "selector": ("torchmpi_py", "#4a7fb5"),
    "symmetric": ("torchmpi_py,\nsymmetric tensor", "#1f5a94"),
}
BACKGROUND, TEXT = "#f7f7f5", "#222233"

report, picture = load(pathlib.Path(sys.argv[1])), sys.argv[2]
times = {(row.what, row.num_bytes): row.median_seconds * 1e3 for row in report.rows if row.buffers == "warm"}
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bars", "font.size": 11, "text.color": TEXT})
figure = Figure(figsize=(9, 2.6), layout="constrained", facecolor=BACKGROUND)
for axes, size in zip(figure.subplots(1, len(SIZES), sharey=True), SIZES, strict=True):
    values = [times[what, size] for what in BARS]
    labels, colors = zip(*BARS.values(), strict=True)
    bars = axes.barh(range(len(values)), values, color=colors, height=0.7)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
    axes.set_title(f"allreduce of {format_size(size)}, ms", fontsize=11)
    axes.set(facecolor=BACKGROUND, xlim=(0, 1.18 * max(values)), xticks=[])
    axes.set_yticks(range(len(values)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=TEXT)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
figure.axes[0].invert_yaxis()  # the axes share it
figure.savefig(picture, metadata={"Date": None} if picture.endswith(".svg") else None)
