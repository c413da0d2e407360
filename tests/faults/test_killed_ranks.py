"""The death of one rank in collectives of every flavour, or at any moment: the job ends as ends.md says, in all ways.

At *any moment* the rank imports, starts, works or stops. All processes end, the first death is named and gives the job
its exit code, and nothing is left.
"""

import json
import re

import harness
import pytest
from support.jobs import needs_mpi

pytestmark = [pytest.mark.timeout(3000), needs_mpi]

WAYS = [  # flavour, memory, nodes
    *(("shared", "ordinary", 1), ("mpi", "ordinary", 2), ("mpi", "ordinary", 1), ("ring", "ordinary", 1)),
    *(("ring", "symmetric", 2), ("shared", "symmetric", 1), ("", "symmetric", 1), ("staged", "ordinary", 1)),
    *((name, memory, 1) for name in ("hierarchical", "cudaipc") for memory in ("ordinary", "symmetric")),
    *(("gloo", "ordinary", nodes) for nodes in (1, 2)),
]
VERBS = ["allreduce", "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall"]
LACKING = {"gloo": ["reduce_scatter", "alltoall"], "hierarchical": ["reduce_scatter", "alltoall"]}
WHERE = ["a random moment", "a random moment", "between", "between"]
MORE = {"blocking": ["in the operation"], "async": ["communication thread", "before waiting"]}
DEATHS = {  # exit code, and the last line
    "SIGKILL": (137, "was killed by signal 9"),
    "SIGSEGV": (139, "was killed by signal 11"),
    "os._exit": (5, "ended in the middle of the program, with exit code 5"),
}
LAST = 8.0 if harness.ALL else 3.0  # seconds; the whole program takes about 4
INSIDE = {"shared": ["kernel", "before a barrier", "after a barrier"], "cudaipc": ["kernel"]}


def plans(number):
    """Each way, ranks, size and pause in turn; the rest by chance, from a seed."""
    draw = harness.seeded("kill")
    for index in range(number):
        flavour, memory, nodes = WAYS[index % len(WAYS)]
        ranks, form = draw.choice([2, 3, 4] if harness.ALL else [2, 3]), draw.choice(["blocking", "async"])
        verb = draw.choice([verb for verb in VERBS if verb not in LACKING.get(flavour, [])])
        num_bytes = draw.choice((4, 1 << 10, 4 << 20))
        is_large = num_bytes > 1 << 20
        is_posted = form == "async" and not is_large and flavour in ("", "mpi")  # MPI carries it out
        where = WHERE + MORE[form] * (not is_posted) + INSIDE.get(flavour, []) * (verb == "allreduce")
        fault = {"rank": draw.randrange(ranks), "what": "SIGKILL", "where": draw.choice(where)}
        # A small allreduce of two ranks has one barrier alone.
        fault |= {"skip": draw.randrange(2) * (ranks > 2), "at": draw.randrange(1, 5 if is_large else 60)}
        fault |= {"delay_seconds": draw.uniform(0, 0.05 if is_large else 0.002)}
        plan = {"ranks": ranks, "flavour": flavour, "memory": memory, "nodes": nodes, "verb": verb, "form": form}
        plan |= {"bytes": num_bytes, "pause_seconds": draw.choice((0, 0.005, 0.05)), "operations": 10**6}
        yield plan | {"fault": fault}
        fault = {"rank": fault["rank"], "what": draw.choice([*DEATHS]), "where": "", "after": draw.uniform(0, LAST)}
        yield plan | {"fault": fault, "operations": 10 if is_large else 50, "pause_seconds": 0.02}


def trial(plan):
    fault = plan["fault"]
    line = harness.command(plan["ranks"], harness.WORK, json.dumps(plan))
    outcome = harness.run(" ".join(map(str, plan.values())), line)
    outcome.expect("WRONG" not in outcome.output, outcome.output)
    if outcome.code == 0 and "all done" in outcome.output and "after" in fault:
        outcome.name = f"end, {outcome.name}"  # the moment came after the program
        return outcome
    code, end = DEATHS[fault["what"]]
    outcome.expect(outcome.code == code, f"the exit code is not {code}")
    last = outcome.errors.partition("\n[dump ")[0].rstrip().rpartition("\n")[2]
    is_named = re.fullmatch(rf"torchmpirun: rank {fault['rank']} \(process \d+\) {end}", last)
    outcome.expect(bool(is_named), f"the last line is {last!r}")
    return outcome


def test_a_rank_dies(judge):
    judge("a death", harness.at_once(2, plans(harness.count(1, 84)), trial))
