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
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import page
from table import MODES, TWIN, Mode

ROOT = Path(__file__).parents[2]
COUNTED = Path(__file__).with_name("counted.py")
FORMAT = "benchmarks/modes 2"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: mode ("" with ``command`` for a twin), and after each epoch and at the end seconds and accuracy."""

    mode: str
    seed: int
    pause_seconds: float
    seconds: list[float]
    accuracy: list[float]  # shares of the test set
    num_bytes: float  # sent by a rank, mean over the ranks


def main() -> int:
    """Run all, write the results; 1 if a mode is further from its twin than it may be."""
    options = parse(sys.argv[1:])
    begin, facts = time.monotonic(), page.facts()
    twins = sorted({mode.twin for mode in options.modes})
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for seed in range(1111, 1111 + options.seeds):
            runs += [run_twin(twin, seed, options, Path(folder)) for twin in twins]
            runs += [run(mode, seed, 0.0, options, Path(folder)) for mode in options.modes]
        if options.pause:
            runs += [run(mode, 1111, options.pause, options, Path(folder)) for mode in options.modes]
    report = page.Report(
        settings={name: getattr(options, name) for name in ("ranks", "epochs", "seeds", "batch", "pause")},
        facts=facts | {"load at the end": page.facts()["load"], "minutes": f"{(time.monotonic() - begin) / 60:.1f}"},
        modes=[dataclasses.asdict(mode) for mode in options.modes],
        runs=[dataclasses.asdict(one) for one in runs],
    )
    return publish(report, options)


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="benchmarks/modes", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--modes", type=modes_by_name, default=MODES, metavar="a,b", help="default: all")
    add("--ranks", type=int, default=4, help="default: 4")
    add("--epochs", type=int, default=25, help="default: 25")
    add("--batch", type=int, default=60, help="samples a step, over all ranks; default: 60")
    add("--seeds", type=int, default=2, help="trainings of each mode; default: 2")
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


def run_twin(twin: str, seed: int, options: argparse.Namespace, folder: Path) -> Run:
    """A training in one process."""
    command = [sys.executable, str(ROOT / "examples" / TWIN), *shlex.split(twin)]
    return measured(f"twin {twin}".rstrip(), command, seed, 0.0, options, folder)


def run(mode: Mode, seed: int, pause: float, options: argparse.Namespace, folder: Path) -> Run:
    """A training of a mode."""
    launcher = [str(Path(sys.executable).with_name("torchmpirun")), "-n", str(options.ranks), str(COUNTED), str(folder)]
    words = shlex.split(mode.options.replace("runs", str(folder / f"{mode.name}-{seed}-{pause}")))
    command = [*launcher, str(ROOT / "examples" / mode.program), *words]
    return measured(mode.name, command, seed, pause, options, folder)


def measured(name: str, command: list[str], seed: int, pause: float, options: argparse.Namespace, folder: Path) -> Run:
    """Run a command, and read what it has left in ``folder``. SystemExit, with its output, if it fails."""
    curve = folder / "curve.json"
    for left in folder.glob("bytes-*"):
        left.unlink()
    common = f"--epochs {options.epochs} --batch {options.batch} --seed {seed} --pause {pause} --curve {curve}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *common.split()], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    points = json.loads(curve.read_text())
    sent = [json.loads(left.read_text()) for left in folder.glob("bytes-*")]
    num_bytes = sum(sum(one.values()) for one in sent) / options.ranks
    print(f"{name:24} seed {seed}, {points['seconds'][-1]:6.2f} s, {100 * points['accuracy'][-1]:6.2f} %", flush=True)
    return Run(name, seed, pause, points["seconds"], points["accuracy"], num_bytes)


def publish(report: page.Report, options: argparse.Namespace) -> int:
    """Write the results; 1 if a mode is further from its twin than it may be."""
    name = f"modes_{options.ranks}ranks_{dt.datetime.now(dt.timezone.utc):%Y%m%d}"
    options.out.mkdir(parents=True, exist_ok=True)
    stored = {"format": FORMAT} | dataclasses.asdict(report)
    (options.out / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(page.render(report) + "\n")
    page.draw(report, options.out / f"{name}.png")
    if options.docs:
        page.insert(report, options.docs, options.out / f"{name}.png")
    print(page.table(report))
    far = [row.name for row in page.rows(report) if abs(row.gain) > page.LARGEST_GAIN]
    if far:
        print(f"more than {page.LARGEST_GAIN} points from the twin: {', '.join(far)}", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
