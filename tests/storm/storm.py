"""Runs storms as jobs, one after another, and shrinks a failing program: python storm.py --help."""

import argparse
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from storm_draw import program

JOB = Path(__file__).with_name("storm_job.py")
DEADLINE_SECONDS = 30
MOST_SECONDS_A_JOB = 120


class Outcome:
    """What a job said: ``round`` is the number of the last one, None where there was none."""

    def __init__(self, code, text, seconds):
        self.failed, self.text, self.seconds = code != 0, text, seconds
        numbers = re.findall(r"storm: round (\d+)", text)
        self.round = int(numbers[-1]) if numbers else None
        operations = re.search(r"(\d+) operations in (\d+) rounds", text)
        self.operations = int(operations.group(1)) if operations else 0

    def summary(self):
        """The lines that matter."""
        telling = r"storm: (seed|.*wrong|.*failed)|    rank \d|torchmpi_py: report"
        lines = [line for line in self.text.splitlines() if re.match(telling, line)]
        return "\n".join(line[:400] for line in lines[:8])


def job(ranks, *arguments, seconds=MOST_SECONDS_A_JOB):
    """Run one job to its end."""
    launcher = [sys.executable, "-m", "torchmpi_py.launch", "-n", str(ranks), "--timeout", str(int(seconds))]
    command = ["env", f"TORCHMPI_DEADLINE={DEADLINE_SECONDS}", "OMP_NUM_THREADS=1", *launcher, str(JOB)]
    begin = time.monotonic()
    command += map(str, arguments)
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return Outcome(ended.returncode, ended.stdout + ended.stderr, time.monotonic() - begin)


def shrink(ranks, seed, number, seconds):
    """The shortest program that was found to fail within so many seconds, as text; None if none failed again."""
    until = time.monotonic() + seconds

    def fails(kept):
        if time.monotonic() > until or not kept:
            return False
        text = ";".join(f"{index}:{','.join(map(str, places))}" for index, places in kept)
        again = job(ranks, "--seed", seed, "--round", number, "--repeat", 8, "--keep", text)
        return again.failed

    actors = program(seed, number, ranks)
    kept = [(index, list(range(len(actor.steps)))) for index, actor in enumerate(actors)]
    if not fails(kept):
        return None
    for part in list(kept):  # whole actors, then steps
        fewer = [each for each in kept if each is not part]
        kept = fewer if fails(fewer) else kept
    for index, places in list(kept):
        for place in places if len(places) > 1 else ():
            fewer = [(i, [p for p in ps if (i, p) != (index, place)]) for i, ps in kept]
            kept = fewer if all(ps for _, ps in fewer) and fails(fewer) else kept
    lines = []
    for index, places in kept:
        actors[index].steps = [actors[index].steps[place] for place in places]
        lines.append(str(actors[index]))
    return "\n".join(lines)


def tell(outcome, ranks, seed, seconds):
    """Print a failure, with its seed and the shortest failing program."""
    print(outcome.summary() or outcome.text[-3000:])
    again = f"torchmpirun -n {ranks} {JOB.name} --seed {seed}"
    if outcome.round is None:
        print(f"    again: {again}")
        return
    print(f"    again: {again} --round {outcome.round} --repeat 8")
    found = shrink(ranks, seed, outcome.round, seconds)
    print(f"shortest failing program:\n{found}" if found else "    it did not fail again by itself", flush=True)


def run(options):
    """Storms with new seeds until the time is over; whether all went well."""
    rng = random.Random(options.seed)
    until = time.monotonic() + 60 * options.minutes
    operations, num_jobs, num_failed = 0, 0, 0
    while (left := until - time.monotonic()) > 5:
        ranks, seed = options.ranks[num_jobs % len(options.ranks)], rng.randrange(10**6)
        outcome = job(ranks, "--seed", seed, "--seconds", min(left, options.seconds), seconds=options.seconds + 90)
        operations += outcome.operations
        num_jobs += 1
        if outcome.failed:
            num_failed += 1
            tell(outcome, ranks, seed, options.shrink)
        else:
            print(outcome.summary(), flush=True)
    print(f"storm: {num_jobs} jobs, {operations} operations, {options.minutes:g} minutes, {num_failed} failed")
    return num_failed == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seconds", type=float, default=60, help="of one job")
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[2, 3, 4, 5])
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--shrink", type=float, default=180, help="seconds to look for a shorter program")
    options = parser.parse_args()
    print(f"storm: seed {options.seed}", flush=True)
    sys.exit(0 if run(options) else 1)


if __name__ == "__main__":
    main()
