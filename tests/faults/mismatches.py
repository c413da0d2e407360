"""Programs whose ranks make the same calls, but for one mismatch: drawn from a seed, written as text.

Each call stands in a line of its own, in a function for each rank, so that a message can be judged by the lines that it
names. Values depend on the element, the rank and the number of the call, and every result is checked: as if the other
ranks had made the call that this rank made.
"""

import dataclasses
import random
import re
from collections.abc import Sequence

VERBS = ["allreduce", "allreduce", "broadcast", "reduce", "allgather", "gather"]
VERBS += ["reduce_scatter", "scatter", "alltoall"]
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")
DTYPES = ["float32", "float64", "int32", "int64", "float16", "bfloat16", "uint8"]
OPS = ["sum", "max", "min", "prod"]
FORMS = ["blocking", "async"]
COMMS = ["world", "world", "split", "level"]
COUNTS = [12, 24, 1200, 120_000]
FLAVOURS = ["", "", "mpi", "mpi", "ring", "shared", "hierarchical", "gloo"]
CAN = {  # the verbs that are not in all flavours
    "hierarchical": ("allreduce", "broadcast", "reduce", "allgather"),
    "gloo": ("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter"),
}
KINDS = ["verb", "count", "dtype", "op", "root", "order", "fewer", "more", "comm", "form", "flavour"]

HEAD = """
import os, sys, time, uuid
from pathlib import Path
import torch, torchmpi_py as mpi

folder = Path(os.environ["FAULTS_JOB"])
(folder / f"came-{uuid.uuid4()}").touch()
while len(list(folder.glob("came-*"))) < int(os.environ.get("FAULTS_RANKS", "0")):
    time.sleep(0.01)  # on several hosts, whose ranks come at different times: the deadline also holds for the start
mpi.start()
me, size = mpi.rank(), mpi.size()
lines = [line.split(maxsplit=5) for line in open("/proc/self/maps").read().splitlines()]
names = {line[5] for line in lines if len(line) == 6 and line[5].startswith("/dev/shm/")}
(folder / f"held-{me}").write_text("\\n".join(name for name in names if not name.endswith("(deleted)")))
C = {"world": None, "split": mpi.split(0), "level": mpi.communicator(mpi.push_communicator(0))}
mpi.set_collective_span(0, mpi.push_communicator(me % 2))
C["level"] = mpi.communicator(0) if C["level"].size != size else C["level"]
SYMMETRIC = mpi.symmetric_empty(1 << 20, dtype=torch.uint8)


def values(number, rank, count):
    return (torch.arange(count) + 2 * rank + number) % 5 + 1


def make(number, count, dtype, memory):
    x = values(number, me, count).to(getattr(torch, dtype))
    return x if memory == "ordinary" else SYMMETRIC[: x.nbytes].view(x.dtype).copy_(x)


def check(number, verb, count, dtype, op, root, result):
    inputs = [values(number, rank, count) for rank in range(size)]
    reduced = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "prod": torch.prod}[op](torch.stack(inputs), 0)
    part = slice(me * count // size, (me + 1) * count // size)
    expected = {
        "allreduce": reduced, "reduce": reduced if me == root else inputs[me], "broadcast": inputs[root],
        "allgather": torch.cat(inputs), "gather": torch.cat(inputs) if me == root else None,
        "reduce_scatter": reduced[part], "scatter": inputs[root][part],
        "alltoall": torch.cat([x[part] for x in inputs]),
    }[verb]
    if expected is None or result is None:
        right = expected is result
    else:
        right = torch.equal(result, expected.to(getattr(torch, dtype)))
    if not right:
        print(f"WRONG: call {number}, {verb}, on rank {me}", flush=True)


"""
TAIL = """
globals()[f"rank_{me}"]()
print("done", flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a verb."""

    number: int
    verb: str
    form: str
    flavour: str
    dtype: str
    count: int
    op: str
    root: int
    comm: str
    memory: str

    @property
    def line(self) -> str:
        """Its line in the program."""
        arguments = [f"make({self.number}, {self.count}, {self.dtype!r}, {self.memory!r})"]
        arguments += [str(self.root)] * (self.verb in ROOTED)
        arguments += [f"op={self.op!r}"] * (self.verb in REDUCING)
        arguments += [f"comm=C[{self.comm!r}]", f"flavour={self.flavour or None!r}"]
        call = f"mpi.{self.verb}{'_async' * (self.form == 'async')}({', '.join(arguments)})"
        expected = f"{self.number}, {self.verb!r}, {self.count}, {self.dtype!r}, {self.op!r}, {self.root}"
        return f"check({expected}, {call}{'.wait()' * (self.form == 'async')})"

    @property
    def effect(self) -> tuple:
        """What distinguishes a call: two calls with the same effect are the same call."""
        op, root = self.op * (self.verb in REDUCING), self.root * (self.verb in ROOTED)
        is_gather = self.verb in ("allgather", "gather")  # sizes may differ, from which the flavour follows
        sizes = () if is_gather else (self.flavour, self.count)
        return self.verb, self.form, *sizes, self.dtype, op, root, self.comm

    def others(self, kind: str, ranks: int, flavours: Sequence[str]) -> list["Call"]:
        """The calls that differ in the attribute ``kind``; none if nobody would see the difference."""
        values = {"verb": VERBS, "count": COUNTS, "dtype": DTYPES, "op": OPS, "root": range(ranks), "form": FORMS}
        values |= {"comm": COMMS, "flavour": filter(None, flavours)}
        calls = [dataclasses.replace(self, **{kind: value}) for value in dict.fromkeys(values[kind])]
        calls = [call for call in calls if call.effect != self.effect and _can(call.flavour, call.verb)]
        return [call for call in calls if call.flavour != "hierarchical" or call.comm == "world"]


def _can(flavour: str, verb: str) -> bool:
    return verb in CAN.get(flavour, VERBS)


def draw_call(draw: random.Random, number: int, ranks: int, flavours: Sequence[str] = FLAVOURS) -> Call:
    """Any right call."""
    verb = draw.choice(VERBS)
    flavour = draw.choice([flavour for flavour in flavours if _can(flavour, verb)])
    comm = "world" if flavour == "hierarchical" else draw.choice(COMMS)
    dtype = draw.choice([dtype for dtype in DTYPES if flavour != "gloo" or dtype not in ("bfloat16", "float16")])
    form, count, op = draw.choice(FORMS), draw.choice(COUNTS), draw.choice(OPS)
    root, memory = draw.randrange(ranks), draw.choice(["ordinary", "ordinary", "symmetric"])
    return Call(number, verb, form, flavour, dtype, count, op, root, comm, memory)


@dataclasses.dataclass
class Program:
    """The program of a trial, and the mismatch in it."""

    kind: str
    ranks: int
    odd: int
    description: str
    text: str
    rank_of_line: dict[int, int]

    def ranks_named(self, message: str) -> set[int]:
        """The ranks whose lines a message names."""
        lines = [int(line) for line in re.findall(r"program\.py:(\d+) in rank_", message)]
        return {self.rank_of_line[line] for line in lines if line in self.rank_of_line}


def draw_program(draw: random.Random, kind: str, flavours: Sequence[str] = FLAVOURS) -> Program:
    """Four right calls, a mismatch of a ``kind`` on one rank, and right calls again."""
    ranks, at = draw.choice([2, 3, 3, 4]), 4
    calls = [draw_call(draw, number, ranks, flavours) for number in range(2 * at + 1)]
    is_whole = kind in ("order", "fewer", "more")
    while not is_whole and not calls[at].others(kind, ranks, flavours):
        calls[at] = draw_call(draw, at, ranks, flavours)
    while kind == "order" and calls[at + 1].effect == calls[at].effect:
        calls[at + 1] = draw_call(draw, at + 1, ranks, flavours)
    odd, odd_calls = draw.randrange(ranks), list(calls)
    if kind == "order":
        odd_calls[at : at + 2] = [calls[at + 1], calls[at]]
    elif kind == "fewer":
        del odd_calls[at]
    elif kind == "more":
        odd_calls.insert(at, draw_call(draw, 99, ranks, flavours))
    else:
        odd_calls[at] = draw.choice(calls[at].others(kind, ranks, flavours))
    lines, rank_of_line = HEAD.split("\n"), {}
    for rank in range(ranks):
        lines.append(f"def rank_{rank}():")
        for line in [call.line for call in (odd_calls if rank == odd else calls)] + ["mpi.stop()"]:
            lines.append(f"    {line}")
            rank_of_line[len(lines)] = rank
    description = f"{kind}, {ranks} ranks, rank {odd}: {odd_calls[at].effect} for {calls[at].effect}"
    return Program(kind, ranks, odd, description, "\n".join(lines) + TAIL, rank_of_line)


def judged(program, outcome):
    """The class of an outcome, with its problems noted."""
    named = program.ranks_named(outcome.errors)
    both = program.odd in named and len(named) > 1
    wrong = "WRONG" in outcome.output
    if outcome.code == 0:
        outcome.expect(not wrong, f"SILENT WRONG VALUE: {outcome.output}")
        return "no effect"
    if "gloo::EnforceNotMet" in outcome.errors:  # a thread of gloo's own ends the process
        return "ended by gloo"
    outcome.expect(both, f"names lines of ranks {sorted(named)} only")
    if "RanksDisagree" in outcome.errors:
        return f"RanksDisagree on {'all' if outcome.errors.count('RanksDisagree: ') >= program.ranks else 'some'}"
    if "report of rank" in outcome.errors:
        return "reported at the deadline"
    outcome.expect(both, "ended in another way")
    return "ended by another error"
