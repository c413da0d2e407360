"""A fault in a job on several hosts, and what follows: the job ends in time, leaves nothing, and names the culprit.

Faults of a rank are injected by its program (``tests/faults/striking.py``); a link that goes down and a power cut come
from the bed. A host whose link is down lives on: ranks there have to end too, only daemons of the MPI's own may stay
until the link is up again.
"""

import dataclasses
import json
import re
import time

import harness
import jobs
from testbed import Bed

DEADLINE_SECONDS = 5
WITHIN_SECONDS = 40.0  # of the fault: the deadline, the launcher's own limits, and a machine under load
MENDED_SECONDS = 60.0  # until a daemon behind a link that was down has noticed the end
OF_RANKS = ("SIGKILL", "SIGSTOP")
OF_HOSTS = ("link down", "power cut")
LOST = r"(unreachable|not reachable|not answered|does not answer|no answer|lost|gone|dead|died|down)"


@dataclasses.dataclass
class Trial:
    """One job, and the fault in it: on the ``victim`` rank, or on the last host."""

    fault: str
    way: jobs.Way
    layout: jobs.Layout
    victim: int
    program: str = str(harness.WORK)
    work: dict = dataclasses.field(default_factory=dict)
    pause_seconds: float = 0.3
    step: int = 50

    @property
    def name(self) -> str:
        ranks = " + ".join(str(number) for number in self.layout.values())
        return f"{self.fault} of rank {self.victim} of {ranks}, {self.way} {' '.join(map(str, self.work.values()))}"

    @property
    def host(self) -> str:
        """The host of the victim."""
        return [host for host, number in self.layout.items() for _ in range(number)][self.victim]

    def plan(self) -> dict:
        """What the program of the job does, as ``tests/faults/work.py`` takes it."""
        plan = {"flavour": "", "verb": "allreduce", "form": "blocking", "memory": "ordinary", "bytes": 4096}
        plan |= {"pause_seconds": 0.005, "operations": 10**6, "ranks": sum(self.layout.values()), "meets": True}
        fault = {"rank": -1}
        if self.fault not in OF_HOSTS:
            where = "hook" if "training" in self.program else "between"
            fault = {"rank": self.victim, "what": self.fault, "where": where, "at": self.step}
        return plan | self.work | {"fault": fault}

    def strike(self, bed: Bed) -> None:
        """The part of the fault that comes from outside."""
        time.sleep(self.pause_seconds)
        if self.fault == "link down":
            bed.link(self.host, is_up=False)
        elif self.fault == "power cut":
            bed.kill(self.host)

    def run(self, bed: Bed) -> harness.Outcome:
        """The whole trial."""
        environment = {"TORCHMPI_DEADLINE": str(DEADLINE_SECONDS)}
        line = [self.program, json.dumps(self.plan())]
        job = jobs.Job(bed, self.way, self.layout, line, environment=environment)
        if not job.wait_until_it_works():
            job.end()
            raise AssertionError(f"{self.name}: the job did not begin to work\n{job.output}\n{job.errors}")
        self.strike(bed)
        ending = job.wait(WITHIN_SECONDS, may_stay=self.host if self.fault == "link down" else "")
        outcome = ending.outcome(self.name)
        self.judge(outcome)
        if self.fault == "link down":
            bed.link(self.host, is_up=True)
            still = job.wait(MENDED_SECONDS).left
            outcome.expect(not still, f"when the link was up again it left {still}")
        return outcome

    def judge(self, outcome: harness.Outcome) -> None:
        """Note what is wrong."""
        outcome.expect(outcome.is_hang or outcome.code not in (0, 124), f"the exit code is {outcome.code}")
        outcome.expect("WRONG" not in outcome.output, f"SILENT WRONG VALUE: {outcome.output}")
        outcome.expect(self.names_the_culprit(outcome.errors), f"{self.culprit} is not named")

    @property
    def culprit(self) -> str:
        return f"rank {self.victim}" if self.fault in OF_RANKS else f"host {self.host}"

    def names_the_culprit(self, text: str) -> bool:
        """Whether the rank is said to be dead or stopped, the host to be lost; by the package or by torchmpirun."""
        if self.fault == "SIGKILL":
            killed = re.search(r"srun: error: \S+ tasks? ([\d,-]+): Killed", text)  # the first one is the victim
            # These end the job before a report, and torchmpirun sees its own host alone.
            is_elsewhere = self.way.launcher == "ssh" and self.host != next(iter(self.layout))
            if is_elsewhere and self.way.mpi == "mpich":
                return "torchmpirun: cannot tell which rank failed first" in text
            if is_elsewhere and "An error occurred in Socket closed" in text:  # Open MPI, sometimes
                return "a rank of another host may have failed earlier" in text
            return harness.names_the_dead(text, self.victim) or bool(killed and killed[1] == str(self.victim))
        if self.fault == "SIGSTOP":
            seen_from = r"(\(process \d+\)|does not)"  # its node, or others
            return bool(re.search(rf"rank {self.victim} {seen_from}: its process is stopped", text))
        ours = " ".join(line for line in text.splitlines() if line.startswith(("torchmpi", "rank ", "host ")))
        return bool(re.search(rf"(?i)\b{self.host}\b[^;.]{{0,80}}{LOST}|{LOST}[^;.]{{0,40}}\b{self.host}\b", ours))
