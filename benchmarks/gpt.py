"""Tokens per second of examples/gpt.py on two ranks, over this package and over gloo, and its loss on 1, 2 and 4 ranks.

python benchmarks/gpt.py benchmarks/gpt_2ranks_2cores_DATE

The ways alternate for some rounds, each as a job of its own, because each job starts on other cores and with other
memory. Then one full training on each number of ranks draws the curve. The arguments name the files, without suffix.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from matplotlib.figure import Figure

from torchmpi_py.bench import results

ROUNDS, STEPS, BATCH, CONTEXT = 5, 100, 12, 128
GLOO = "DDP on gloo"
WAYS = {
    "one rank, one thread": (1, ""),
    "DistributedOptimizer": (2, ""),
    "DDP on torchmpi": (2, "--ddp"),
    GLOO: (2, "--ddp --backend gloo"),
    "FSDP2 on torchmpi": (2, "--fsdp"),
    "FSDP2 on gloo": (2, "--fsdp --backend gloo"),
}
ROOT = pathlib.Path(__file__).parents[1]


def job(num_ranks, *words):
    """What a job with one thread a rank prints, and the JSON file that it stores, without which it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "report.json"
        line = [pathlib.Path(sys.executable).with_name("torchmpirun"), "-n", str(num_ranks), *words, file]
        done = subprocess.run(
            line, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
        )
        return done.stdout, json.loads(file.read_text())


def gpt(num_ranks, *words):
    """What the example prints, and its points: steps, seconds and mean loss."""
    printed, curve = job(num_ranks, ROOT / "examples" / "gpt.py", *words, "--curve")
    return printed, curve["points"]


def speed(points):
    """Tokens per second after the first point, which has the first step."""
    (first, begin, _), *_, (last, end, _) = points
    return (last - first) * BATCH * CONTEXT / (end - begin)


os.environ.pop("OMPI_MCA_threads_pthreads_yield_strategy", None)
os.environ["TORCHMPI_TUNING_DIR"] = os.devnull
target = pathlib.Path(sys.argv[1])
facts = job(2, "-m", "torchmpi_py.bench", "run", "--sizes", "4", "--seconds", "0.01", "--json")[1]["facts"]
speeds = {name: [] for name in WAYS}
for turn in range(ROUNDS):
    for name in sorted(WAYS, key=list(WAYS).index, reverse=bool(turn % 2)):
        num_ranks, words = WAYS[name]
        speeds[name].append(speed(gpt(num_ranks, "--steps", str(STEPS), *words.split())[1]))
        print(name, round(speeds[name][-1]), flush=True)
trainings = {num_ranks: gpt(num_ranks) for num_ranks in (1, 2, 4)}

report = {"facts": facts, "rounds": ROUNDS, "steps": STEPS, "tokens_per_second": speeds}
report["curves"] = {num_ranks: points for num_ranks, (_, points) in trainings.items()}
target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")

header = ["what", "tokens/s, median", "least", "most", "x gloo's, of its round: median"]
rows = []
for name, each in speeds.items():
    peers = speeds["FSDP2 on gloo" if "FSDP" in name else GLOO]
    ratio = statistics.median(ours / theirs for ours, theirs in zip(each, peers, strict=True))
    rows.append(
        [name, *(f"{number:.0f}" for number in (statistics.median(each), min(each), max(each))), f"{ratio:.3f}"]
    )
notes = [f"rounds: {ROUNDS}, {STEPS} steps in each"]
text = results.document("examples/gpt.py, 0.8 M parameters, batch of 12 sequences of 128", facts, notes, header, rows)
losses = [["step", *(f"{num_ranks} rank{'s' * (num_ranks > 1)}" for num_ranks in trainings)]]
for number, (step, *_) in enumerate(trainings[1][1]):
    losses.append([str(step), *(f"{points[number][2]:.5f}" for _, points in trainings.values())])
table = "\n".join(f"| {' | '.join(row)} |" for row in (losses[0], ["---:"] * len(losses[0]), *losses[1:]))
written = trainings[2][0].split("tokens/s\n")[-1]
text += f"\n\nMean loss since the step above:\n\n{table}\n\nThe text of 2 ranks:\n\n```text\n{written}```\n"
target.with_suffix(".md").write_text(text)

figure = Figure(figsize=(12, 4.6), layout="constrained")
figure.suptitle(f"examples/gpt.py, 2 cores; torch {facts['torch']}, {facts['date']}", fontsize=11)
left, right = figure.subplots(1, 2)
for number, (num_ranks, (_, points)) in enumerate(trainings.items()):
    steps, _, mean = zip(*points, strict=True)
    left.plot(steps, mean, label=f"{num_ranks} rank{'s' * (num_ranks > 1)}", linewidth=7 - 2.5 * number)
left.set(xlabel="step", title="loss (nats per character)")
left.legend()
right.barh(list(speeds), [statistics.median(each) for each in speeds.values()], color="0.8")
for name, each in speeds.items():
    right.plot(each, [name] * len(each), "C0o", markersize=4)
right.set(title="tokens per second: median, and each round")
right.invert_yaxis()
for axes in (left, right):
    axes.grid(visible=True, color="0.9")
figure.savefig(target.with_suffix(".png"), dpi=120)
