"""A fault of any kind on one rank, anywhere: the job ends soon, with the right code, and prints the error once."""

import json

import harness
import pytest
from support.jobs import needs_mpi

pytestmark = [pytest.mark.timeout(2400), pytest.mark.usefixtures("full_collections"), needs_mpi]

WHAT = ["exception", "MemoryError", "sys.exit", "os._exit", "SIGKILL"]
IN_STOP = ["stop", "stop after meeting", "after stop"]
IN_STEPS = ["between", "in the operation", "communication thread", "before a barrier"]
WHERE = {
    "work.py": ["before start", *IN_STEPS, *IN_STOP],
    "training.py": ["hook", "prefetch thread"],
    "serving.py": ["service thread"],
}
CODES = {"exception": 1, "MemoryError": 1, "sys.exit": 3}


def cases():
    """All, or some from a seed. Plain mpirun omits what is before the start (docs/launch/cluster.md)."""
    places = [(program, where) for program, places in WHERE.items() for where in places]
    every = [(starter, *place, what) for starter in ("torchmpirun", "mpirun") for place in places for what in WHAT]
    every = [case for case in every if case[0] == "torchmpirun" or case[2] != "before start"]
    return every if harness.ALL else harness.seeded("ends").sample(every, 2)


def trial(case):
    starter, program, where, what = case
    draw = harness.seeded(f"end {starter, where, what}")
    ranks = draw.choice([2, 3]) if harness.ALL else 2
    at_once = where in ("before start", "prefetch thread") or "stop" in where
    fault = {"rank": draw.randrange(ranks), "what": what, "where": where, "at": -1 if at_once else 3}
    form = "async" if where == "communication thread" else "blocking"
    plan = {"flavour": "shared", "verb": "allreduce", "form": form, "bytes": 1 << 10, "memory": "ordinary"}
    plan |= {"pause_seconds": 0, "operations": 10, "fault": fault}
    line = harness.command(ranks, harness.HERE / program, json.dumps(plan), starter=starter)
    name = f"{starter}, {where}, {what}, rank {fault['rank']} of {ranks}"
    outcome = harness.run(name, line, {"TORCHMPI_DEADLINE_SECONDS": "3"})
    outcome.expect("WRONG" not in outcome.output, outcome.output)
    wanted = CODES.get(what) if starter == "torchmpirun" else None
    is_right = outcome.code == wanted if wanted else outcome.code != 0
    outcome.expect(is_right, f"the exit code is not {wanted or 'a failure'}")
    times = outcome.errors.count("Error: the fault of this trial")
    outcome.expect(times == (what in ("exception", "MemoryError")), f"the error is printed {times} times")
    return outcome


def test_the_job_ends(judge):
    outcomes = harness.at_once(3, cases(), trial)
    judge("every end", outcomes, lambda outcome: f"every end, {outcome.name.partition(',')[0]}")
