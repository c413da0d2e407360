"""Programs drawn from a seed: which threads of every rank do what, on which groups, in an order that is legal.

A *round* is a program of several *actors*. An actor is one thread on every rank, with groups that no other actor of the
round has; it goes through its *steps* in order, and each rank takes those of the groups that it belongs to. So ranks
never wait for each other in a cycle. Asynchronous calls of ``mpi`` share one thread a process, and have to be launched
in one order on all ranks: one actor of a round makes them. Groups of torch.distributed have a thread each: there odd
ranks launch in another order than even ones. All is drawn alike on every rank.
"""

import dataclasses
import random

DTYPES = ["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8"]
ITEMSIZE = dict(zip(DTYPES, [4, 8, 2, 2, 4, 8, 1], strict=True))
MPI_VERBS = [
    "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall", "gather", "scatter", "sendreceive"
]  # fmt: skip
DIST_VERBS = ["allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall"]
BY_ROWS = {"reduce_scatter", "alltoall", "scatter"}  # each rank gives a part of so many elements to each
FLAVOURS = [None, None, None, "shared", "mpi", "ring", "staged", "cudaipc"]
KIB, MIB = 1 << 10, 1 << 20
SIZES = [  # weight; bytes, around which
    (0.30, [0, 1, 64, 4 * KIB, 16 * KIB]),
    (0.25, [32 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, MIB]),
    (0.32, [MIB, 2 * MIB, 4 * MIB]),
    (0.11, [8 * MIB, 16 * MIB, 17 * MIB]),
    (0.02, [32 * MIB, 64 * MIB]),
]
NUM_MPI_GROUPS, NUM_DIST_GROUPS = 6, 5


@dataclasses.dataclass
class Step:
    """One call, or one training step of ``sizes``."""

    number: int
    group: int = 0
    verb: str = "train"
    dtype: str = "float32"
    count: int = 0  # elements a rank brings; for those in BY_ROWS to each rank
    op: str = "sum"
    root: int = 0
    symmetric: bool = False
    out: bool = False
    uneven: bool = False
    flavour: str | None = None
    is_async: bool = False
    waits: bool = True  # afterwards, for all that is under way

    def __str__(self):
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "verb" and getattr(self, field.name) != field.default
        }
        return f"{self.verb}({', '.join(f'{key}={value!r}' for key, value in changed.items())})"


@dataclasses.dataclass
class Actor:
    """One thread of every rank. ``kind``: blocking, async (mpi), dist, ddp, engine."""

    kind: str
    steps: list[Step]
    sizes: list[int] = dataclasses.field(default_factory=list)  # of parameters
    option: bool = False  # ddp: the hook average; engine: asynchronous

    def __str__(self):
        extra = f" sizes={self.sizes} option={self.option}" if self.sizes else ""
        return "\n".join([f"{self.kind}{extra}:", *(f"    {step}" for step in self.steps)])


def groups(seed, size):
    """(groups of mpi, groups of torch.distributed): the ranks of each. The first of each is the world."""
    rng = random.Random(f"{seed} groups {size}")

    def some():
        return sorted(rng.sample(range(size), rng.randint(min(2, size), size)))

    whole = list(range(size))
    in_mpi = [whole, whole, whole, *(some() for _ in range(NUM_MPI_GROUPS - 3))]
    return in_mpi, [whole, whole, *(some() for _ in range(NUM_DIST_GROUPS - 2))]


def program(seed, number, size):
    """The actors of a round."""
    rng = random.Random(f"{seed} round {number}")
    in_mpi, in_dist = groups(seed, size)
    free_mpi, free_dist = list(range(1, NUM_MPI_GROUPS)), list(range(NUM_DIST_GROUPS))
    rng.shuffle(free_mpi)
    rng.shuffle(free_dist)
    actors = [_main(rng, number, free_mpi, in_mpi)]
    for kind in rng.sample(["blocking", "blocking", "dist", "dist", "ddp", "ddp"], rng.randint(2, 4)):
        if kind == "blocking" and free_mpi:
            actors.append(_calls(rng, kind, [free_mpi.pop()], in_mpi, MPI_VERBS, number))
        elif kind == "dist" and len(free_dist) > 1:
            actors.append(_calls(rng, kind, [free_dist.pop(), free_dist.pop()], in_dist, DIST_VERBS, number))
        elif kind == "ddp" and free_dist:
            actors.append(_training(rng, kind, free_dist.pop(), number))
    twins = [actor for actor in actors if actor.kind == "ddp"]
    if len(twins) == 2 and rng.random() < 0.7:  # two copies of a module, each on a group
        twins[1].sizes, twins[1].option = list(twins[0].sizes), twins[0].option
    for index, actor in enumerate(actors):
        for place, step in enumerate(actor.steps):
            step.number = number * 1000 + index * 100 + place
    return actors


def _main(rng, number, free, groups):
    if rng.random() < 0.3:
        return _training(rng, "engine", 0, number)
    return _calls(rng, "async", [0, free.pop(), free.pop()], groups, MPI_VERBS, number)


def _training(rng, kind, group, number):
    sizes = [_count(rng, 4, 4 * MIB) + 1 for _ in range(rng.randint(1, 4))]
    return Actor(kind, [Step(0, group) for _ in range(rng.randint(2, 4))], sizes, rng.random() < 0.5)


def _calls(rng, kind, own, groups, verbs, number):
    steps, left = [], 96 * MIB
    for _ in range(rng.randint(4, 12)):
        group = rng.choice(own)
        step = _call(rng, kind, group, len(groups[group]), verbs, left)
        left -= step.count * ITEMSIZE[step.dtype] * (len(groups[group]) if step.verb in BY_ROWS else 1)
        steps.append(step)
    steps[-1].waits = True
    return Actor(kind, steps)


def _call(rng, kind, group, size, verbs, left):
    verb, dtype = rng.choice(verbs), rng.choice(DTYPES if rng.random() < 0.5 else DTYPES[:1])
    step = Step(0, group, verb, dtype)
    step.count = _count(rng, ITEMSIZE[dtype], max(left, KIB))
    if verb in BY_ROWS or verb in ("allgather", "gather"):
        step.count = -(-step.count // size)
    step.op = rng.choice(["sum", "sum", "max", "min"] + ["avg"] * (dtype in DTYPES[:2]))
    step.root = rng.randrange(size)
    step.symmetric = rng.random() < 0.4
    step.out = verb in ("allreduce", "alltoall") and rng.random() < 0.4
    step.uneven = kind != "dist" and verb in ("allgather", "gather") and rng.random() < 0.3
    step.flavour = rng.choice(FLAVOURS) if kind != "dist" else None
    if group == 0 and kind == "async" and rng.random() < 0.3:
        step.flavour = "hierarchical"
    step.is_async = kind != "blocking" and rng.random() < 0.7
    step.waits = not step.is_async or rng.random() < 0.4
    return step


def _count(rng, itemsize, most_bytes):
    around = rng.choice(rng.choices([sizes for _, sizes in SIZES], [weight for weight, _ in SIZES])[0])
    return max(0, min(around, most_bytes) // itemsize + rng.choice([-1, 0, 0, 1, 7, 100]))
