"""One table of all training strategies: each mode's program in ``examples/``, beside a single-process baseline.

    python benchmarks/modes                     # all of docs/strategies.md: table, picture, dated results
    python benchmarks/modes --modes easgd,hogwild --seeds 1 --epochs 5 --out build     # some, elsewhere

Every program is run by torchmpirun, with the same options: epochs, samples per step, seed. One job per mode trains with
each seed, then once more with a last rank that sleeps in every step (``trainings.py``). Accuracy is that of the mode's
result on the test set. Seconds are those of training, without the start of processes and without the tests after each
epoch. Bytes are counted on each rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import page
from table import MODES, TWIN, Mode

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRAININGS = Path(__file__).with_name("trainings.py")
FIRST_SEED = 1111
TIME_LIMIT_SECONDS = 600  # of one job, beside whatever else the machine does
FORMAT = "benchmarks/modes 2"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a mode or a twin: after each epoch and at the end, seconds and accuracy."""

    mode: str
    seed: int
    pause_seconds: float
    seconds: list[float]
    accuracy: list[float]  # shares of the test set
    num_bytes: float  # sent by a rank, mean over the ranks


def main() -> int:
    """Run all, write the results; 1 if a command failed, or a mode is further from its twin than it may be."""
    options = parse(sys.argv[1:])
    begin, facts = time.monotonic(), page.facts()
    runs: list[Run] = []
    planned = list(schedule(options))
    num_planned = sum(len(trainings) for _, _, trainings in planned)
    for name, words, trainings in planned:
        with tempfile.TemporaryDirectory() as folder:
            try:
                runs += run(name, words, trainings, options, Path(folder))
            except subprocess.SubprocessError as error:
                print(f"{error}\n{getattr(error, 'stdout', '')}", file=sys.stderr, flush=True)
            except KeyboardInterrupt:
                print("interrupted: what is there is written", file=sys.stderr)
                break
    done = {one.mode for one in runs if not one.pause_seconds}
    report = page.Report(
        settings={name: getattr(options, name) for name in ("ranks", "epochs", "seeds", "batch", "pause")},
        facts=facts
        | {"load at the end": page.facts()["load"], "runs": f"{len(runs)} of {num_planned}"}
        | minutes_since(begin),
        modes=[dataclasses.asdict(mode) for mode in options.modes if {mode.name, page.twin_name(mode.twin)} <= done],
        runs=[dataclasses.asdict(one) for one in runs],
    )
    publish(report, options)
    far = [row.name for row in page.rows(report) if abs(row.gain) > page.LARGEST_GAIN]
    if far:
        print(f"more than {page.LARGEST_GAIN} points from the twin: {', '.join(far)}", file=sys.stderr)
    return 1 if far or len(runs) < num_planned else 0


def minutes_since(begin: float) -> dict[str, str]:
    """How long all took, and the cores' time in it, which is the same beside other jobs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "minutes": f"{(time.monotonic() - begin) / 60:.1f}",
        "minutes of cores": f"{(used.ru_utime + used.ru_stime) / 60:.1f}",
    }


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="benchmarks/modes", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--modes", type=modes_by_name, default=MODES, metavar="a,b", help="default: all")
    add("--ranks", type=int, default=4, help="default: 4")
    add("--epochs", type=int, default=20, help="default: 20")
    add("--batch", type=int, default=60, help="samples a step, over all ranks; default: 60")
    add("--seeds", type=int, default=3, help="trainings of each mode; default: 3")
    add("--pause", type=float, default=0.005, help="seconds by which the last rank is slower in a step; default: 0.005")
    add("--out", type=Path, default=ROOT / "benchmarks", help="folder for the results; default: benchmarks/")
    add("--docs", type=Path, help="the page whose table is written; default: docs/strategies.md, if all modes are run")
    options = parser.parse_args(words)
    if options.docs is None and options.modes is MODES:
        options.docs = ROOT / "docs" / "strategies.md"
    return options


def modes_by_name(text: str) -> list[Mode]:
    """The rows of these names, separated by commas."""
    known = {mode.name: mode for mode in MODES}
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known modes: {', '.join(known)}")
    return [known[name] for name in text.split(",")]


def schedule(options: argparse.Namespace) -> Iterator[tuple[str, list[str], list[tuple[int, float]]]]:
    """(name, command, (seed, pause) of each training) of each job; the baselines come first, and never pause."""
    seeds = [(seed, 0.0) for seed in range(FIRST_SEED, FIRST_SEED + options.seeds)]
    for twin in sorted({mode.twin for mode in options.modes}):
        yield page.twin_name(twin), command(TWIN, twin, []), seeds
    launcher = [str(Path(sys.executable).with_name("torchmpirun")), "-n", str(options.ranks)]
    for mode in options.modes:
        paused = [(FIRST_SEED, options.pause)] if options.pause else []
        yield mode.name, command(mode.program, mode.options, launcher), seeds + paused


def command(program: str, words: str, launcher: list[str]) -> list[str]:
    """The command of a job, except for its trainings, which take the place of "TRAININGS"."""
    return [*(launcher or [sys.executable]), str(TRAININGS), "TRAININGS", str(EXAMPLES / program), *shlex.split(words)]


def run(
    name: str, words: list[str], trainings: list[tuple[int, float]], options: argparse.Namespace, folder: Path
) -> list[Run]:
    """Run the trainings of a job in ``folder``, and read what it leaves there. SubprocessError if the job fails."""
    pairs = ",".join(f"{seed}:{pause}" for seed, pause in trainings)
    words = [pairs if word == "TRAININGS" else word for word in words]
    common = f"--epochs {options.epochs} --batch {options.batch} --curve curve.json"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    subprocess.run(
        [*words, *common.split()], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=True, timeout=TIME_LIMIT_SECONDS,
    )  # fmt: skip
    runs = []
    for number, (seed, pause) in enumerate(trainings):
        left = folder / f"training-{number}"
        points = json.loads((left / "curve.json").read_text())
        num_bytes = sum(json.loads(file.read_text()) for file in left.glob("bytes-*")) / options.ranks
        runs.append(Run(name, seed, pause, points["seconds"], points["accuracy"], num_bytes))
    accuracies = ", ".join(f"{100 * one.accuracy[-1]:.2f}" for one in runs)
    print(f"{name:24} {time.monotonic() - begin:6.1f} s, accuracy {accuracies} %", flush=True)
    return runs


def publish(report: page.Report, options: argparse.Namespace) -> None:
    """Store the report and the picture, show the table, and put it into the page if there is one."""
    name = f"modes_{options.ranks}ranks_{dt.datetime.now(dt.timezone.utc):%Y%m%d}"
    options.out.mkdir(parents=True, exist_ok=True)
    stored = {"format": FORMAT} | dataclasses.asdict(report)
    (options.out / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(page.render(report) + "\n")
    page.draw(report, options.out / f"{name}.png")
    if options.docs:
        page.insert(report, options.docs, options.out / f"{name}.png")
    print(page.table(report))


if __name__ == "__main__":
    sys.exit(main())
