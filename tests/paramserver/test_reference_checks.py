"""TorchMPI's five checks of its parameter server (reference 9.3), with values that depend on element and rank.

TorchMPI filled its tensors with constants and repeated each check 100 times; set TORCHMPI_REPEATS=100 to do the same.
"""

import os

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.paramserver.shard import shards

REPEATS = int(os.environ.get("TORCHMPI_REPEATS", "5"))
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


def values(rank, count):
    return (torch.arange(count) * 7 + rank * 3) % 101 + 1.0


@pytest.fixture(params=["below", "at", "above", 1024, 911 * 101])
def count(request, mpi):
    """The number of elements: below, at and above the number of ranks, and those of TorchMPI."""
    return {"below": mpi.size() - 1, "at": mpi.size(), "above": mpi.size() + 1}.get(request.param, request.param)


def test_one_and_two_seeding(comm, count):
    """Every rank seeds its own part; a fresh tensor receives all of them."""
    for turn in range(REPEATS):
        server = ps.init(values(comm.rank + turn, count), comm=comm)
        got = torch.zeros(count)
        server.receive(got).wait()
        expected = [values(r + turn, count)[begin:end] for r, (begin, end) in enumerate(shards(count, comm.size))]
        assert torch.equal(got, torch.cat(expected))
        server.free()


def test_three_zero(mpi, comm, count):
    for _ in range(REPEATS):
        server = ps.init(values(comm.rank, count), comm=comm)
        mpi.barrier(comm)
        if comm.rank == comm.size - 1:
            server.send(values(0, count), "zero").wait()
        mpi.barrier(comm)
        assert not server.receive(torch.ones(count)).wait().any()
        server.free()


def test_four_copy(mpi, comm, count):
    for turn in range(REPEATS):
        server = ps.init(values(comm.rank, count), comm=comm)
        if comm.rank == comm.size - 1:
            server.send(values(turn, count), "copy").wait()
        mpi.barrier(comm)
        assert torch.equal(server.receive(torch.zeros(count)).wait(), values(turn, count))
        server.free()


def test_five_copy_then_add(mpi, comm, count):
    for turn in range(REPEATS):
        server = ps.init(values(comm.rank, count), comm=comm)
        if comm.rank == comm.size - 1:
            server.send(values(turn, count), "copy").wait()
        mpi.barrier(comm)
        server.send(values(comm.rank + turn, count), "add").wait()
        mpi.barrier(comm)
        got = server.receive(torch.full((count,), 123.0)).wait()
        assert torch.equal(got, values(turn, count) + sum(values(r + turn, count) for r in range(comm.size)))
        server.free()
