"""Plot what the examples write with `--curve`: accuracy over time, and seconds over ranks where the numbers differ.

python benchmarks/curves.py ranks1.json ranks2.json ranks4.json curves.png
"""

import json
import pathlib
import sys

from matplotlib.figure import Figure

*paths, picture = sys.argv[1:]
curves = {pathlib.Path(path).stem: json.loads(pathlib.Path(path).read_text()) for path in paths}
by_program = {}
for curve in curves.values():
    by_program.setdefault(curve["program"], {})[curve["ranks"]] = curve["seconds"][-1]
scaling = {program: times for program, times in by_program.items() if len(times) > 1}

figure = Figure(figsize=(12 if scaling else 8, 4.6), layout="constrained")
versions = ", ".join(sorted({f"{curve['versions']}; {curve['date']}" for curve in curves.values()}))
figure.suptitle(f"{', '.join(by_program)}: accuracy on the test set\n{versions}", fontsize=11)
left, *right = figure.subplots(1, 2 if scaling else 1, squeeze=False)[0]
for name, curve in curves.items():
    label = f"{name}: {curve['ranks']} rank{'s' * (curve['ranks'] > 1)}"
    left.plot(curve["seconds"], [100 * each for each in curve["accuracy"]], label=label, marker="o", markersize=4)
left.set(xlabel="seconds of training", title="accuracy (%)")
for axes in right:
    # The colours continue after the ones of the curves, which are in the same legend.
    for number, (program, times) in enumerate(scaling.items(), len(curves)):
        ranks = sorted(times)
        axes.plot(ranks, [times[each] for each in ranks], f"C{number}s-", label=f"{program}, measured")
        ideal = [times[ranks[0]] * ranks[0] / each for each in ranks]
        axes.plot(ranks, ideal, label=f"{program}, in proportion", linestyle=":", color="0.4", marker=".")
    axes.set(xlabel="ranks", title="seconds of the whole training", ylim=(0, None))
    axes.set_xticks(sorted({each for times in scaling.values() for each in times}))
for axes in (left, *right):
    axes.grid(visible=True, color="0.9")
figure.legend(loc="outside right upper", fontsize="small")
figure.savefig(picture, dpi=120)
