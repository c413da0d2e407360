"""``compare --mpi``: the same comparison on several MPIs, as one table.

Each MPI lies in an environment of its own, and a process loads one MPI. So this command, a plain process, starts
``compare`` as a job of each environment's Python, and reads the reports that the jobs store. The jobs take turns: all
MPIs once, then again, so that load on the machine hits all of them, and each time in the table is the median over these
rounds. More turns within one job would not do: a job's ranks keep the cores and the buffers that they got at its start.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchmpi_py.bench import UsageError, WrongValue, command_line, compare, progress_bar, results
from torchmpi_py.bench.candidates import GLOO, LIMITS, RAW_MPI, SELECTOR, SYMMETRIC
from torchmpi_py.bench.results import Report
from torchmpi_py.launch import variables

_FORMAT = "torchmpi_py.bench mpis 1"
_DEFAULTS = ["--buffers", "warm", "--flavours", f"{SELECTOR},{SYMMETRIC}"]
_START_SECONDS = 120  # for a job to start and to end
_MOST_PER_SECOND = 20  # seconds of a job for each second that it was to measure, before it counts as hanging


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``compare``, with those for several MPIs."""
    compare.add_compare_options(parser)
    _add_own_options(parser)


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    pairs = "start compare with each of these Pythons and show one table; a plain process, without torchmpirun"
    parser.add_argument("--mpi", type=_interpreters, metavar="NAME=PYTHON,...", help=pairs)
    parser.add_argument("-n", dest="num_ranks", type=command_line.count, metavar="N", help="with --mpi: ranks of a job")
    rounds = "with --mpi: jobs of each MPI, which alternate; default: 3"
    parser.add_argument("--rounds", type=command_line.count, default=3, metavar="K", help=rounds)


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


def is_wanted(options: argparse.Namespace) -> bool:
    """Whether the options of ``compare`` name several MPIs. UsageError unless --mpi and -n are given together."""
    if (options.mpi is None) != (options.num_ranks is None):
        raise UsageError("compare: --mpi and -n go together; the ranks of one MPI are those of torchmpirun -n")
    return options.mpi is not None


def main(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Start the jobs, print the table and store the reports; ``words`` is the command line that gave ``options``.

    Raises UsageError and WrongValue.
    """
    if variables.rank_in(os.environ) is not None:
        raise UsageError("compare --mpi starts torchmpirun itself; run it as a plain process: python -m ...")
    if problem := results.unwritable(options.json):
        raise UsageError(problem)
    limit_seconds = _START_SECONDS + _MOST_PER_SECOND * options.seconds * 2 * len(compare.sizes_of(options))
    launch = ["-m", "torchmpi_py.launch", "-n", str(options.num_ranks), "--timeout", str(limit_seconds)]
    # The job's own options come last, so that they count more than the defaults.
    job = [*launch, "-m", "torchmpi_py.bench", "compare", *_DEFAULTS, *_words_of_job(words)]
    reports: dict[str, list[Report]] = {name: [] for name in options.mpi}
    turns = list(itertools.product(range(1, options.rounds + 1), options.mpi))
    for _, name in progress_bar.shown(
        turns, lambda turn: f"round {turn[0]}, {turn[1]}", rank=0, always=options.progress
    ):
        reports[name].append(_report_of_job(name, [options.mpi[name], *job]))
    report = MpisReport(reports)
    results.publish(0, render(report), _FORMAT, report, options.json)


def _words_of_job(words: Sequence[str]) -> list[str]:
    """The words after "compare" without the options that this command carries out itself."""
    own = command_line.Parser(add_help=False)
    _add_own_options(own)
    command_line.add_output(own)
    return own.parse_known_args(words)[1][1:]


def _report_of_job(name: str, command: Sequence[str]) -> Report:
    """Run one job to its end."""
    with tempfile.TemporaryDirectory(prefix="torchmpi_py-bench-") as folder:
        path = Path(folder, "report.json")
        done = subprocess.run([*command, "--json", str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if done.returncode:
            kind = WrongValue if done.returncode == 1 else UsageError
            raise kind(f"compare --mpi: the job of {name} ended with exit code {done.returncode}; it says why above")
        return results.load(path)


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
