"""SIGSTOP of one rank: the deadline's report names rank and operation; SIGCONT before it, and the result is right."""

import json
import re

import harness
import pytest
from support.jobs import needs_mpi

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, needs_mpi]

DEADLINE_SECONDS = 3 if harness.ALL else 8
REPORT_SECONDS = 2.0 if harness.ALL else 10.0  # how long after the deadline the report may come; other tests may run
END_SECONDS = 4.0  # and after it the end: the report waits for a stopped rank to tell where it stands
WHERE = {"blocking": ["between", "in the operation", "before a barrier"], "async": ["between", "communication thread"]}
WAYS = [("mpi", "blocking"), ("shared", "blocking"), ("ring", "async"), ("shared", "async"), ("gloo", "blocking")]


def trial(index, operations, at, **keywords):
    draw = harness.seeded(f"stop {index}")
    flavour, form = WAYS[index % len(WAYS)]
    where = draw.choice([where for where in WHERE[form] if flavour == "shared" or "barrier" not in where])
    ranks = draw.choice([2, 3, 4])
    victim = draw.randrange(ranks)
    fault = {"rank": victim, "what": "SIGSTOP", "where": where, "at": at, "skip": draw.randrange(2)}
    plan = {"ranks": ranks, "flavour": flavour, "verb": "allreduce", "form": form, "memory": "ordinary"}
    plan |= {"bytes": draw.choice([4, 1 << 10, 4 << 20]), "pause_seconds": 0.002, "operations": operations}
    line = harness.command(ranks, harness.WORK, json.dumps(plan | {"fault": fault}))
    environment = {"TORCHMPI_DEADLINE_SECONDS": str(DEADLINE_SECONDS)}
    outcome = harness.run(f"stop {index} {' '.join(map(str, plan.values()))} {fault}", line, environment, **keywords)
    outcome.expect("WRONG" not in outcome.output, outcome.output)
    return victim, outcome


def stays_stopped(index):
    within = DEADLINE_SECONDS + REPORT_SECONDS + END_SECONDS + harness.ENDING_SECONDS
    victim, outcome = trial(index, 10**6, 30, within_seconds=within)
    outcome.expect(outcome.code == 1, "the exit code is not 1")
    found = re.search(r"operation is not complete after ([\d.]+) s", outcome.errors)
    outcome.expect(found and float(found[1]) <= DEADLINE_SECONDS + REPORT_SECONDS, "the report is late, or missing")
    stopped = re.search(rf"rank {victim} \(process \d+\): its process is stopped", outcome.errors)
    outcome.expect(bool(stopped), f"rank {victim} is not said to be stopped")
    outcome.expect("waits in allreduce" in outcome.errors, "the operation is not named")
    return outcome


def goes_on(index):
    _, outcome = trial(100 + index, 60, 20, within_seconds=30, resume_seconds=1.5)
    outcome.expect(outcome.code == 0 and "all done" in outcome.output, "it did not go on")
    return outcome


def test_a_rank_is_stopped(judge):
    judge("SIGSTOP until the deadline", harness.at_once(3, range(harness.count(1, 30)), stays_stopped))


def test_a_rank_is_stopped_for_a_while(judge):
    judge("SIGSTOP, then SIGCONT", harness.at_once(3, range(harness.count(1, 20)), goes_on))
