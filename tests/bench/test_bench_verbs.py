import pytest
import torch

from torchmpi_py.bench.cases import VERBS, Task


def task(verb, rank=0, size=3, dtype=torch.float32):
    return Task(VERBS[verb], dtype, "sum", rank, size)


@pytest.mark.parametrize(
    ("verb", "factor"),
    [
        ("allreduce", 1.5),
        ("reduce_scatter", 0.75),
        ("allgather", 0.75),
        ("alltoall", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_factors_of_4_ranks(verb, factor):
    assert VERBS[verb].bus_factor(4) == factor


def test_sizes_are_whole_elements_and_slices():
    assert task("allreduce").rounded(4) == 4
    assert task("allreduce").rounded(5) == 8
    assert task("allgather").rounded(4) == 12
    assert task("alltoall", dtype=torch.int8).rounded(7) == 9


def test_bytes_are_those_of_the_larger_tensor():
    gather, scatter = task("allgather"), task("reduce_scatter")
    assert [gather.count(part, 24) for part in (gather.verb.x, gather.verb.out)] == [2, 6]
    assert [scatter.count(part, 24) for part in (scatter.verb.x, scatter.verb.out)] == [6, 2]
    assert task("broadcast").count("", 24) == 0


@pytest.mark.parametrize("verb", VERBS)
def test_expected_results_fill_what_a_rank_gets(verb):
    for rank in range(3):
        mine = task(verb, rank)
        counts = [count for _, count in mine.expected(24)]
        if verb in ("reduce", "gather") and rank:
            assert counts == []
        else:
            assert sum(counts) == mine.count(mine.verb.out or mine.verb.x, 24)


def test_what_an_exchange_brings():
    whole = [task("alltoall").pattern(rank)[:6] for rank in range(3)]
    got = [numbers[:count] for numbers, count in task("alltoall", rank=1).expected(24)]
    assert torch.cat(got).equal(torch.cat([x[2:4] for x in whole]))
