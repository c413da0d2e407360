"""A fault of any kind on one rank, anywhere: the job ends soon, with the right code, and prints the error once."""

import json

import harness
import pytest

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("full_collections"),
    pytest.mark.skipif(bool(harness.MISSING), reason=harness.MISSING),
]

WHAT = ["exception", "MemoryError", "sys.exit", "os._exit", "SIGKILL"]
WHERE = {
    "before start": "work.py",
    "between": "work.py",
    "in the operation": "work.py",
    "communication thread": "work.py",
    "before a barrier": "work.py",
    "stop": "work.py",
    "stop after meeting": "work.py",
    "after stop": "work.py",
    "hook": "training.py",
    "prefetch thread": "training.py",
    "service thread": "serving.py",
}
CODES = {"exception": 1, "MemoryError": 1, "sys.exit": 3}
PRINTED = {"exception": "RuntimeError: the fault of this trial", "MemoryError": "MemoryError: the fault of this trial"}
DEADLINE_SECONDS = 3
LEFT_TO_THE_MPI = [  # the mpirun's own starter: what docs/launch/index.md says that one does without
    ("mpirun", "before start", "exception"),
    ("mpirun", "before start", "MemoryError"),
    ("mpirun", "before start", "sys.exit"),
    ("mpirun", "before start", "os._exit"),
    ("mpirun", "before start", "SIGKILL"),
]


def cases():
    """All, or some from a seed."""
    every = [(starter, where, what) for starter in ("torchmpirun", "mpirun") for where in WHERE for what in WHAT]
    every = [case for case in every if case not in LEFT_TO_THE_MPI]
    return every if harness.ALL else harness.seeded("ends").sample(every, 3)


def trial(case):
    starter, where, what = case
    draw = harness.seeded(f"end {case}")
    ranks = draw.choice([2, 3])
    fault = {"rank": draw.randrange(ranks), "what": what, "where": where, "at": 3 if "stop" not in where else -1}
    if where in ("before start", "prefetch thread"):
        fault["at"] = -1
    form = "async" if where == "communication thread" else "blocking"
    plan = {"flavour": "shared", "verb": "allreduce", "form": form, "bytes": 1 << 10, "memory": "ordinary"}
    plan |= {"pause_seconds": 0, "operations": 10, "fault": fault}
    line = harness.command(ranks, harness.HERE / WHERE[where], json.dumps(plan), starter=starter)
    environment = {"TORCHMPI_DEADLINE_SECONDS": str(DEADLINE_SECONDS)}
    outcome = harness.run(f"{starter}, {where}, {what}, rank {fault['rank']} of {ranks}", line, environment)
    outcome.expect("WRONG" not in outcome.output, outcome.output)
    wanted = CODES.get(what) if starter == "torchmpirun" else None
    outcome.expect(
        outcome.code == wanted if wanted else outcome.code != 0, f"the exit code is not {wanted or 'a failure'}"
    )
    if what in PRINTED:
        times = outcome.errors.count(PRINTED[what])
        outcome.expect(times == 1, f"the error is printed {times} times")
    return outcome


@pytest.mark.parametrize("part", range(harness.count(1, 4)))
def test_the_job_ends(judge, part):
    outcomes = harness.at_once(3, cases()[part :: harness.count(1, 4)], trial)
    judge("every end", outcomes, lambda outcome: f"every end, {outcome.name.partition(',')[0]}")
