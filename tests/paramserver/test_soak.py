"""Many random sends and receives from all ranks, without waiting: what comes of them, and what is left behind.

Each rank draws from a generator of its own, which the others know: so every rank can compute, in one process and in any
order, what a server has to hold in the end. TORCHMPI_SOAK_OPERATIONS=10000 makes so many, over all ranks.
"""

import gc
import os
import random
import threading

import pytest
import torch
from support import jobs
from support.values import values

from torchmpi_py import paramserver as ps
from torchmpi_py.paramserver.shard import shards

TASKS = "/proc/self/task"
NUM_OPERATIONS = int(os.environ.get("TORCHMPI_SOAK_OPERATIONS", "400"))
PER_ROUND = 100  # of one rank, on servers that are made for it
SCALES = [-3, -1, 2, 5]
# Sums of small whole numbers are exact in all of them; uint8 wraps around, in any order alike.
DTYPES = [torch.float32, torch.float64, torch.int16, torch.int32, torch.int64, torch.uint8, torch.complex128]

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60 + NUM_OPERATIONS // 20)]


def layouts(seed, size):
    """The sizes and dtypes of the servers of a round: below, at and above one element a rank."""
    draw = random.Random(seed)
    counts = [0, 1, size - 1, size, size + 1, draw.randrange(2, 100), draw.randrange(1000, 10_000)]
    return [(count, draw.choice(DTYPES)) for count in draw.sample(counts, draw.randint(1, 4))]


def operations(seed, rank, num_servers):
    """What a rank asks of servers in a round: (server, rule or "" for a receive, options, number, waits for it)."""
    draw = random.Random(f"{seed} {rank}")
    for number in range(PER_ROUND):
        rule, options = draw.choice([("add", {}), ("scaled_add", {"scale": draw.choice(SCALES)}), ("", {})])
        yield draw.randrange(num_servers), rule, options, number, draw.random() < 0.1


def seeded(size, count, dtype):
    parts = [values(rank, count, dtype)[begin:end] for rank, (begin, end) in enumerate(shards(count, size))]
    return torch.cat(parts)


def expected(seed, size, made):
    """What the servers hold when all ranks have done what they do, one after another."""
    held = [seeded(size, count, dtype) for count, dtype in made]
    for rank in range(size):
        for server, rule, options, number, _ in operations(seed, rank, len(made)):
            if rule:
                held[server].add_(values(rank, *made[server], number), alpha=options.get("scale", 1))
    return held


def play(comm, seed):
    """A round: servers are made, all ranks do what they do, and the servers are compared, and freed under a send."""
    made = layouts(seed, comm.size)
    servers = [ps.init(values(comm.rank, *layout), comm=comm) for layout in made]
    for server, rule, options, number, is_waited_for in operations(seed, comm.rank, len(made)):
        sent = values(comm.rank, *made[server], number)
        handle = servers[server].send(sent, rule, **options) if rule else servers[server].receive()
        if is_waited_for:
            handle.wait()
    for server in servers:
        server.receive().wait()  # what this rank has asked before is done
    comm.direct.mpi.Barrier()
    for server, right in zip(servers, expected(seed, comm.size, made), strict=True):
        assert torch.equal(server.receive().wait(), right), (seed, server.shape, server.dtype)
    comm.direct.mpi.Barrier()
    for server, layout in zip(servers, made, strict=True):
        server.send(values(comm.rank, *layout))
    ps.free_all()


def left_behind():
    gc.collect()  # memory of tests before this one may hang in a circle of references
    with open("/proc/self/maps") as maps:
        mappings = sum("torchmpi_py" in line for line in maps)
    threads = sorted(thread.name for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), mappings, threads


def test_random_sends_and_receives(comm):
    num_rounds = max(1, NUM_OPERATIONS // (PER_ROUND * comm.size))
    for seed in (-1, -2):  # what is made once is there then
        play(comm, seed)
    before, tasks = left_behind(), set(os.listdir(TASKS))
    for seed in range(num_rounds):
        play(comm, seed)
    assert left_behind() == before
    jobs.until(lambda: tasks >= set(os.listdir(TASKS)))  # a thread that was waited for is in /proc for a moment yet
