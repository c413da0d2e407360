"""Faults drawn by chance, across hosts, at random moments: no hang, no silent wrong value, and the culprit is named.

TORCHMPI_FAULTS=all makes a hundred trials of six; TORCHMPI_FAULTS_SEED draws others.
"""

import harness
import jobs
import mismatches
import pytest
from support.jobs import write
from trial import DEADLINE_SECONDS, OF_HOSTS, WITHIN_SECONDS, Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

PARTS = harness.count(1, 10)
NUMBER = harness.count(6, 100)
KINDS = ["SIGKILL", "link down", "mismatch", "SIGSTOP", "power cut", "mismatch"]
WAYS = [jobs.Way("ssh", "openmpi"), jobs.Way("ssh", "mpich"), jobs.Way("slurm", "mpich"), jobs.Way("slurm", "openmpi")]
LAYOUTS = [{"nodea": 1, "nodeb": 1}, {"nodea": 2, "nodeb": 1}, {"nodea": 2, "nodeb": 2}]
LAYOUTS += [{"nodea": 1, "nodeb": 1, "nodec": 1}]
VERBS = ["allreduce", "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall"]
FLAVOURS = ["", "mpi", "ring", "hierarchical"]
MISMATCH_WITHIN_SECONDS = jobs.START_SECONDS + WITHIN_SECONDS  # of the start of the job


def drawn(number):
    """A trial in a loop of collectives, or in training: of all together each fault meets each way and each layout."""
    draw = harness.seeded(f"hosts {number}")
    fault, in_turn = KINDS[number % len(KINDS)], number // len(KINDS)
    way, layout = WAYS[in_turn % len(WAYS)], LAYOUTS[in_turn // len(WAYS) % len(LAYOUTS)]
    victim = draw.randrange(sum(layout.values()))
    if fault in OF_HOSTS:
        victim = sum(layout.values()) - 1  # not the host of the launcher
    verb = draw.choice(VERBS)
    able = [name for name in FLAVOURS if name != "hierarchical" or verb not in ("reduce_scatter", "alltoall")]
    work = {"verb": verb, "flavour": draw.choice(able), "form": draw.choice(["blocking", "async"])}
    work |= {"bytes": draw.choice([4, 4096, 1 << 20, 4 << 20]), "memory": draw.choice(["ordinary", "symmetric"])}
    keywords = {"step": draw.randrange(5, 60), "pause_seconds": draw.uniform(0, 2)}
    if draw.random() < 0.3:
        return Trial(fault, way, layout, victim, str(harness.HERE / "training.py"), {"epochs": 10**4}, **keywords)
    return Trial(fault, way, layout, victim, work=work, **keywords)


def mismatch(bed, number):
    """A rank that calls something else; the others are on its host, on another one, or both."""
    draw = harness.seeded(f"hosts {number}")
    kind, way = draw.choice(mismatches.KINDS), draw.choice(WAYS)
    program = mismatches.draw_program(draw, kind, flavours=[*FLAVOURS, "gloo"])
    cut = draw.randrange((program.ranks + 1) // 2, program.ranks)
    layout = {"nodea": cut, "nodeb": program.ranks - cut}
    path = write(bed.shared / f"mismatch-{number}", program.text)
    environment = {"TORCHMPI_DEADLINE": str(DEADLINE_SECONDS), "FAULTS_RANKS": str(program.ranks)}
    ending = jobs.run(bed, way, layout, [str(path)], within_seconds=MISMATCH_WITHIN_SECONDS, environment=environment)
    name = f"mismatch {number} {way} {cut} + {program.ranks - cut} {program.description}"
    outcome = ending.outcome(name)
    mismatches.judged(program, outcome)
    return outcome


@pytest.mark.parametrize("part", range(PARTS))
def test_random_faults(bed, judge, part):
    outcomes = []
    for number in range(part, NUMBER, PARTS):
        is_mismatch = KINDS[number % len(KINDS)] == "mismatch"
        outcomes.append(mismatch(bed, number) if is_mismatch else drawn(number).run(bed))
        bed.mend()
    judge("hosts", outcomes, lambda outcome: "hosts: " + " ".join(outcome.name.split(" of ")[0].split()[:2]))
