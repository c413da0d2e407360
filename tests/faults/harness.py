"""Starts a job in which a fault is injected, and judges how it ended.

A *trial* is one job. Its program (``work.py``, or one that a test writes) writes ``fault-R`` into the folder of the job
when rank R injects its fault, and ``held-R`` with the files in /dev/shm that it has mapped. The *time* of a trial is
from the fault until no process of the job is left; a job that takes longer than its limit is a *hang*, and is killed.
Processes are found by a mark in their environment, as torchmpirun finds those of a job.
"""

import dataclasses
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.jobs import TORCHMPIRUN, VENDOR

from torchmpi_py.launch import cleanup, mpirun
from torchmpi_py.launch.command import starter_words
from torchmpi_py.launch.job_spec import JobSpec

HERE = Path(__file__).parent
WORK = HERE / "work.py"
ALL = os.environ.get("TORCHMPI_FAULTS", "") == "all"
KEPT = os.environ.get("TORCHMPI_FAULTS_DIR")
SEED = int(os.environ.get("TORCHMPI_FAULTS_SEED", "0"))
WITHIN_SECONDS = 10.0 if ALL else 30.0  # other tests may run
ENDING_SECONDS = 3.0  # processes that do not end are killed after it
LEFT_SECONDS = 1.0  # what a job leaves may be under removal
# torch's folder, and Open MPI's for all jobs of a user that have no starter
KEPT_BY_OTHERS = ("torchinductor", f"ompi.{socket.gethostname()}.")
START_SECONDS = 60.0  # a machine under load


@dataclasses.dataclass
class Outcome:
    """How a trial ended."""

    name: str
    code: int
    seconds: float
    output: str
    errors: str
    left: list[str]
    is_hang: bool
    problems: list[str] = dataclasses.field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:
        """Add a problem unless ``holds``."""
        if not holds:
            self.problems.append(problem)

    def describe(self) -> str:
        """The problems, for a failure's message; the whole output goes into the folder TORCHMPI_FAULTS_DIR, if set."""
        problems = f"{self.name}: {'; '.join(self.problems)} (code {self.code}, {self.seconds:.1f} s)"
        if KEPT:
            Path(KEPT).mkdir(exist_ok=True)
            path = Path(KEPT, f"{re.sub('[^A-Za-z0-9.]+', '-', self.name)[:90]}.txt")
            path.write_text(f"{problems}\n{self.output}\n{self.errors}")
        return f"{problems}\n{self.errors[-2000:]}"


def seeded(name: str) -> random.Random:
    """A generator with the same numbers in each run, and other numbers for each kind of trial."""
    return random.Random(f"{SEED} {name}")


def count(few: int, many: int) -> int:
    """Trials: few in the daily tests, or many."""
    return many if ALL else few


def command(ranks: int, program: Path, *arguments: str, starter: str = "torchmpirun") -> list[str]:
    """The command line of a job, by torchmpirun or by the MPI's own starter."""
    if starter == "torchmpirun":
        return [*TORCHMPIRUN, "-n", str(ranks), "--bind", "none", str(program), *arguments]
    vendor, own = mpirun.find("", os.environ)
    return [own, *starter_words(JobSpec(vendor=vendor, num_ranks=ranks)), sys.executable, str(program), *arguments]


def run(
    name: str,
    line: list[str],
    environment: dict[str, str] | None = None,
    within_seconds: float = WITHIN_SECONDS,
    resume_seconds: float | None = None,
) -> Outcome:
    """Run a job to its end; its processes have to be gone ``within_seconds`` of the fault, or else of the start.

    ``resume_seconds`` after the fault the rank that injected it gets SIGCONT.
    """
    with tempfile.TemporaryDirectory(prefix="fault-trial-") as where:
        folder = Path(where)
        (folder / "t").mkdir()
        (folder / "d").mkdir()
        used = {**os.environ, **(environment or {})}
        used |= {"FAULTS_JOB": where, "TMPDIR": f"{where}/t", "TORCHMPI_DUMP_DIR": f"{where}/d", "OMP_NUM_THREADS": "1"}
        used |= {"OMPI_MCA_mpi_yield_when_idle": "true", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}  # many jobs, few cores
        used |= mpirun.vendor_named(VENDOR).root_environment
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            starter = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=used)
        is_hang, seconds = _watch(starter, folder, within_seconds, resume_seconds)
        output, errors = ((folder / stream).read_text(errors="replace") for stream in ("out", "err"))
        left = _left(folder, cleans_up="torchmpi_py.launch" in line or VENDOR != "mpich")
        outcome = Outcome(name, starter.returncode, seconds, output, errors, left, is_hang)
        for path in sorted((folder / "d").iterdir()):
            outcome.errors += f"\n[dump {path.name}, {path.stat().st_size} bytes]"
    outcome.expect(not is_hang, f"it did not end within {within_seconds:g} s")
    outcome.expect(not outcome.left, f"it left {outcome.left}")
    return outcome


def _watch(
    starter: subprocess.Popen, folder: Path, within_seconds: float, resume_seconds: float | None
) -> tuple[bool, float]:
    """Wait for the end of all processes: (whether it was a hang, the seconds since the fault, or else the start)."""
    begin, struck, mark = time.time(), None, f"FAULTS_JOB={folder}"
    while True:
        struck = struck or _when_struck(folder)
        since = time.time() - (struck or begin)
        if struck and resume_seconds is not None and since > resume_seconds:
            resume_seconds = None
            os.kill(int(next(folder.glob("fault-*")).read_text()), signal.SIGCONT)
        ended = starter.poll() is not None
        if ended and not cleanup.processes_with(mark):
            return False, time.time() - (_when_struck(folder) or begin)
        if since > within_seconds + (0 if struck else START_SECONDS):
            for process_id in cleanup.processes_with(mark):
                os.kill(process_id, signal.SIGKILL)
            starter.wait(30)
            return True, since
        time.sleep(0.03 if not ended else 0.005)


def _when_struck(folder: Path) -> float | None:
    return min((path.stat().st_mtime for path in folder.glob("fault-*")), default=None)


def _left(folder: Path, *, cleans_up: bool) -> list[str]:
    """What is still there of a job whose processes are gone: temporary files, and shared memory if it ``cleans_up``.

    MPICH's own starter does not: what its jobs leave is removed here, without a word.
    """
    held = {line for path in folder.glob("held-*") for line in path.read_text().splitlines()}
    until = time.monotonic() + LEFT_SECONDS * cleans_up
    while True:
        files = [name for name in sorted(held) if os.path.exists(name)]
        left = [f"TMPDIR/{name}" for name in sorted(os.listdir(folder / "t")) if not name.startswith(KEPT_BY_OTHERS)]
        if not files + left or time.monotonic() > until:
            break
        time.sleep(0.05)
    for name in files:
        Path(name).unlink(missing_ok=True)
    return files * cleans_up + left


def names_the_dead(text: str, rank: int) -> bool:
    """Whether a rank is named, and that it is dead, in the same sentence."""
    text = re.sub(r"\s+", " ", text)
    return bool(re.search(rf"(?i)rank {rank}\b[^;]{{0,120}}(gone|killed|died|dead|exited|signal)", text))


def at_once(jobs: int, trials, each) -> list[Outcome]:
    """``each(trial)`` for all trials, so many at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(each, trials))
