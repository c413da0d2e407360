"""kill -9 of one rank during collectives of every flavour: all processes end, the dead is named, nothing is left."""

import json

import harness
import pytest

pytestmark = [pytest.mark.timeout(1500), pytest.mark.skipif(bool(harness.MISSING), reason=harness.MISSING)]

SIZES = (4, 1 << 10, 4 << 20)
PAUSES = (0, 0.005, 0.05)
WAYS = [  # flavour, memory, nodes
    ("mpi", "ordinary", 1),
    ("mpi", "ordinary", 2),
    ("ring", "ordinary", 1),
    ("ring", "symmetric", 2),
    ("shared", "ordinary", 1),
    ("shared", "symmetric", 1),
    ("hierarchical", "ordinary", 1),
    ("hierarchical", "symmetric", 1),
    ("gloo", "ordinary", 1),
    ("gloo", "ordinary", 2),
    ("staged", "ordinary", 1),
    ("cudaipc", "ordinary", 1),
    ("cudaipc", "symmetric", 1),
    ("", "symmetric", 1),
]
VERBS = ["allreduce", "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall"]
LACKING = {"gloo": ["reduce_scatter", "alltoall"], "hierarchical": ["reduce_scatter", "alltoall"]}
WHERE = ["a random moment", "a random moment", "between"]
MORE = {"blocking": ["in the operation"], "async": ["communication thread", "before waiting"]}
INSIDE = {"shared": ["kernel", "before a barrier", "after a barrier"], "cudaipc": ["kernel"]}


def plans(number):
    """Each way, ranks, size and pause in turn; the rest by chance, from a seed."""
    draw = harness.seeded("kill")
    for index in range(number):
        flavour, memory, nodes = WAYS[index % len(WAYS)]
        ranks, form = draw.choice([2, 3, 4]), draw.choice(["blocking", "async"])
        verb = draw.choice([verb for verb in VERBS if verb not in LACKING.get(flavour, [])])
        num_bytes = draw.choice(SIZES)
        is_posted = form == "async" and num_bytes < 1 << 16 and flavour in ("", "mpi")  # MPI carries it out
        where = draw.choice(
            WHERE + MORE[form] * (not is_posted) + INSIDE.get(flavour, []) * (verb == "allreduce") + ["between"]
        )
        at = draw.randrange(1, 5 if num_bytes > 1 << 20 else 60)
        fault = {"rank": draw.randrange(ranks), "what": "SIGKILL", "where": where, "at": at}
        fault |= {"delay_seconds": draw.uniform(0, 0.05 if num_bytes > 1 << 20 else 0.002), "skip": draw.randrange(2)}
        plan = {"ranks": ranks, "flavour": flavour, "memory": memory, "nodes": nodes, "verb": verb, "form": form}
        yield plan | {"bytes": num_bytes, "pause_seconds": draw.choice(PAUSES), "operations": 10**6, "fault": fault}


def trial(plan, starter="torchmpirun"):
    fault = plan["fault"]
    name = " ".join(str(value) for value in plan.values())
    line = harness.command(plan["ranks"], harness.WORK, json.dumps(plan), starter=starter)
    outcome = harness.run(name, line)
    outcome.expect(outcome.code not in (0, 124), "the exit code does not say that it failed")
    outcome.expect("WRONG" not in outcome.output, outcome.output)
    outcome.expect(harness.names_the_dead(outcome.errors, fault["rank"]), f"rank {fault['rank']} is not named")
    return outcome


@pytest.mark.parametrize("part", range(harness.count(1, 8)))
def test_a_rank_is_killed(judge, part):
    parts = list(plans(harness.count(3, 14 * 8)))
    judge("SIGKILL in a collective", harness.at_once(2, parts[part :: harness.count(1, 8)], trial))
