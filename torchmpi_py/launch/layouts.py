"""Find the best number of ranks by measurement: ``torchmpirun --layouts train.py``.

A layout is a number of ranks, and the cores that each rank gets from ``--bind``. torchmpirun measures each layout that
uses almost all cores of this host. For each layout it starts another torchmpirun, as for ``--groups``, and the ranks
count their optimizer steps (`runtime.step_count`). When every rank has written its count, torchmpirun ends the layout's
job and starts the next layout. The best layout has the most samples per second, not the shortest step: with more ranks
a step may take longer, but covers more samples. If the batch size of a program is unknown, each step of a rank counts
as one sample.

A cost model would be faster than a short run of the program. We use no model, because the factors that limit the
benefit of more threads (small operators, data loading, memory bandwidth) are not known in advance.
"""

import argparse
import json
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import group_jobs, topology, variables
from torchmpi_py.launch.cleanup import Guardian
from torchmpi_py.launch.job import new_folder
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.notices import printable
from torchmpi_py.launch.signals import Signals

_REFUSED = (
    "num_ranks ranks_per_host hosts hostfile elastic elastic_restart discover max_restarts groups log_dir "
    "profile timeline dry_run"
)
_MOST_LAYOUTS, _LEAST_FULL = 7, 0.95  # limit for the number of layouts; share of the cores that a layout must use
_LEAST_LIMIT_SECONDS = 120.0  # smallest time limit of a layout, for imports, data loading and compilation
_POLL_SECONDS, _SHOWN_LINES = 0.1, 10


@dataclass
class Layout:
    """A number of ranks, with the measurements of a run with these ranks, or the reason why there are none."""

    num_ranks: int
    failure: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)  # reports of the ranks

    @property
    def samples(self) -> list[float]:
        """The samples per second of all ranks together: first over the whole measurement, then in each part of it."""
        rates = [[rate * (report["batch"] or 1) for rate in report["rates"]] for report in self.reports]
        return [sum(part) for part in zip(*rates, strict=True)]

    def row(self, baseline: float) -> str:
        """Return a row of the table; ``baseline`` is the samples per second of the first measured layout."""
        if self.failure:
            return f"{self.num_ranks:5}  {self.failure}"
        steps = sum(report["rates"][0] for report in self.reports) / self.num_ranks
        mebibytes = sum(report["num_bytes"] for report in self.reports) >> 20
        place = f"{self.num_ranks:5} x {self.reports[0]['num_threads']:<7}"
        return f"{place} {steps:9.1f} {self.samples[0]:11.1f} {self.samples[0] / baseline:9.2f} {mebibytes:7} MiB"


def numbers_of_ranks(num_cores: int) -> list[int]:
    """Return the numbers of ranks that use almost all cores if every rank gets equally many cores.

    If there are more than `_MOST_LAYOUTS` such numbers, return a selection in which the ratio between neighbouring
    numbers is nearly constant.
    """
    numbers = range(1, num_cores + 1)
    full = [each for each in numbers if num_cores // each * each >= _LEAST_FULL * num_cores]
    targets = [num_cores ** (step / (_MOST_LAYOUTS - 1)) for step in range(_MOST_LAYOUTS)]
    nearest = {min(full, key=lambda number: max(number / each, each / number)) for each in targets}
    return full if len(full) <= _MOST_LAYOUTS else sorted(nearest)


def check(options: argparse.Namespace, spec: JobSpec) -> None:
    """Raise LaunchError for options, variables and hosts that cannot be combined with --layouts."""
    unfit = [f"--{name.replace('_', '-')}" for name in _REFUSED.split() if getattr(options, name)]
    unfit += ["the variable OMP_NUM_THREADS"] * ("OMP_NUM_THREADS" in {**spec.environment, **spec.variables})
    unfit += ["the other hosts (start torchmpirun in a job with one host)"] * (len(spec.hosts) > 1)
    if unfit:
        names = ", ".join(unfit).replace("--num-ranks", "-n").replace("--ranks-per-host", "--nproc-per-node")
        raise LaunchError(f"--layouts chooses the ranks and threads itself, on this host only; omit {names}")


def run(spec: JobSpec, seconds: float) -> int:
    """Measure the layouts and print a table; return the exit code, which is 1 if no layout could be measured."""
    # Set no grace period, because a program that saves its state at a signal should not save after a measurement.
    limit = spec.timeout or max(_LEAST_LIMIT_SECONDS, 6 * seconds)
    trials = replace(spec, hosts=(), timeout=limit, grace=0.0)
    measured, folder, free = list[Layout](), new_folder(), topology.free_memory()[0]
    print("ranks x threads   steps/s   samples/s  relative      memory", flush=True)
    with Guardian(folder.name), folder, Signals() as signals:
        for layout in map(Layout, numbers_of_ranks(topology.num_usable_cores())):
            largest = max((report["num_bytes"] for former in measured[-1:] for report in former.reports), default=0)
            if largest * layout.num_ranks > free:
                layout.failure = f"skipped: needs {layout.num_ranks} x {largest >> 20} MiB; {free >> 20} MiB are free"
            else:
                _measure(layout, trials, seconds, Path(folder.name), signals)
            if signals.ending:
                return 128 + signals.ending[0]
            measured += [] if layout.failure else [layout]
            print(layout.row(measured[0].samples[0] if measured else 0.0), flush=True)
    if not measured:
        return 1
    *others, best = sorted(measured, key=lambda layout: layout.samples[0])
    print(f"best: -n {best.num_ranks} (use it instead of --layouts, with your other options)")
    if near := [str(layout.num_ranks) for layout in others if max(layout.samples) >= min(best.samples)]:
        print(f"-n {' or '.join(near)} may be as fast, because the speeds varied; to be sure, raise --layout-seconds")
    return 0


def _measure(layout: Layout, spec: JobSpec, seconds: float, folder: Path, signals: Signals) -> None:
    """Run the program in a layout until every rank has written its measurement, the job ends, or a signal arrives."""
    (trial := folder / str(layout.num_ranks)).mkdir()
    added = {variables.LAYOUT: str(trial), variables.LAYOUT_SECONDS: str(seconds)}
    of_layout = replace(spec, num_ranks=layout.num_ranks, variables={**spec.variables, **added})
    with (trial / "output").open("wb") as file:
        process = group_jobs.start_job(of_layout, trial / "spec", output=file)
    files, is_measured = [trial / f"rank-{rank}.json" for rank in range(layout.num_ranks)], False
    code: int | None = None
    while code is None and not (is_measured or signals.ending):
        time.sleep(_POLL_SECONDS)
        signals.look_at_parent()
        code = process.poll()  # Poll before reading the reports, because a rank writes its report before its job ends.
        layout.reports = [json.loads(file.read_text()) for file in files if file.exists()]
        is_measured = sum(report["is_whole"] for report in layout.reports) == layout.num_ranks
    process.send_signal(signal.SIGTERM)  # The signal has no effect if the job has ended.
    code = process.wait()
    if code and not is_measured:
        lines = printable((trial / "output").read_text(errors="replace")).splitlines()[-_SHOWN_LINES:]
        layout.failure = "\n       ".join([f"failed with exit code {code}; its last lines:", *lines])
    elif len(layout.reports) < layout.num_ranks or not all(report["rates"] for report in layout.reports):
        least = min((report["num_steps"] for report in layout.reports), default=0)
        others = max((report["num_others"] for report in layout.reports), default=0)
        other = f" ({others} steps of other optimizers do not count)" if others else ""
        layout.failure = f"ended after {least} steps of the first torch optimizer{other}; a measurement needs more"
