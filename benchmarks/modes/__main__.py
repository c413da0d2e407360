"""One table of all modes of distribution: each mode's program in ``examples/``, beside its twin in one process.

    python benchmarks/modes                     # all of docs/modes.md: table, picture, dated results
    python benchmarks/modes --modes easgd,hogwild --seeds 1 --epochs 5 --out build     # some, elsewhere

Every program is run as its users run it, by torchmpirun, with the same options: epochs, samples per step, seed. Modes
take turns, seed by seed; then each runs once with a last rank that sleeps in every step. Accuracy is that of the mode's
result on the test set, seconds are those of training, without the start of processes and without the tests after each
epoch, and bytes are counted on each rank (``counted.py``).
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
COUNTED = Path(__file__).with_name("counted.py")
FIRST_SEED = 1111
TIME_LIMIT_SECONDS = 600  # of one training, beside whatever else the machine does
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
    runs, planned = [], list(schedule(options))
    for name, command, seed, pause in planned:
        with tempfile.TemporaryDirectory() as folder:
            try:
                runs.append(run(name, command, seed, pause, options, Path(folder)))
            except subprocess.SubprocessError as error:
                print(f"{error}\n{getattr(error, 'stdout', '')}", file=sys.stderr, flush=True)
            except KeyboardInterrupt:
                print("interrupted: what is there is written", file=sys.stderr)
                break
    done = {one.mode for one in runs if not one.pause_seconds}
    report = page.Report(
        settings={name: getattr(options, name) for name in ("ranks", "epochs", "seeds", "batch", "pause")},
        facts=facts
        | {"load at the end": page.facts()["load"], "runs": f"{len(runs)} of {len(planned)}"}
        | minutes_since(begin),
        modes=[dataclasses.asdict(mode) for mode in options.modes if {mode.name, page.twin_name(mode.twin)} <= done],
        runs=[dataclasses.asdict(one) for one in runs],
    )
    publish(report, options)
    far = [row.name for row in page.rows(report) if abs(row.gain) > page.LARGEST_GAIN]
    if far:
        print(f"more than {page.LARGEST_GAIN} points from the twin: {', '.join(far)}", file=sys.stderr)
    return 1 if far or len(runs) < len(planned) else 0


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
    add("--seeds", type=int, default=1, help="trainings of each mode; default: 1")
    add("--pause", type=float, default=0.005, help="seconds by which the last rank is slower in a step; default: 0.005")
    add("--out", type=Path, default=ROOT / "benchmarks", help="folder for the results; default: benchmarks/")
    add("--docs", type=Path, help="the page whose table is written; default: docs/modes.md, if all modes are run")
    options = parser.parse_args(words)
    if options.docs is None and options.modes is MODES:
        options.docs = ROOT / "docs" / "modes.md"
    return options


def modes_by_name(text: str) -> list[Mode]:
    """The rows of these names, separated by commas."""
    known = {mode.name: mode for mode in MODES}
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known modes: {', '.join(known)}")
    return [known[name] for name in text.split(",")]


def schedule(options: argparse.Namespace) -> Iterator[tuple[str, list[str], int, float]]:
    """(name, command, seed, pause) of each run: even ones seed by seed, then the paused ones. The twins come first."""
    for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
        for twin in sorted({mode.twin for mode in options.modes}):
            yield page.twin_name(twin), [sys.executable, f"{EXAMPLES / TWIN}", *shlex.split(twin)], seed, 0.0
        for mode in options.modes:
            yield mode.name, launched(mode, options.ranks), seed, 0.0
    for mode in options.modes if options.pause else ():
        yield mode.name, launched(mode, options.ranks), FIRST_SEED, options.pause


def launched(mode: Mode, num_ranks: int) -> list[str]:
    """The command of a mode, whose ranks count bytes and leave them in the working directory."""
    torchmpirun = Path(sys.executable).with_name("torchmpirun")
    command = [torchmpirun, "-n", num_ranks, COUNTED, EXAMPLES / mode.program, *shlex.split(mode.options)]
    return [str(word) for word in command]


def run(name: str, command: list[str], seed: int, pause: float, options: argparse.Namespace, folder: Path) -> Run:
    """Run a command in ``folder``, and read what it leaves there. SubprocessError if it fails."""
    common = f"--epochs {options.epochs} --batch {options.batch} --seed {seed} --pause {pause} --curve curve.json"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *common.split()], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=True, timeout=TIME_LIMIT_SECONDS,
    )  # fmt: skip
    points = json.loads((folder / "curve.json").read_text())
    num_bytes = sum(json.loads(file.read_text()) for file in folder.glob("bytes-*")) / options.ranks
    print(f"{name:24} seed {seed}, {points['seconds'][-1]:6.2f} s, {100 * points['accuracy'][-1]:6.2f} %", flush=True)
    return Run(name, seed, pause, points["seconds"], points["accuracy"], num_bytes)


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
