import functools

import pytest
import torch

from torchmpi_py.bench import cases
from torchmpi_py.bench.cases import VERBS, Task
from torchmpi_py.bench.compare import DTYPES
from torchmpi_py.core.tensors import ops_of


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_op_has_a_reduction_of_the_dtype_and_sums_are_exact_in_any_order(dtype):
    for size in (1, 2, 3, 5):
        brought = [cases.pattern(dtype, "sum", rank, size) for rank in range(size)]
        forward = functools.reduce(torch.add, brought)
        backward = functools.reduce(torch.add, reversed(brought))
        assert forward.equal(backward)
        assert forward.equal(cases.reduced(dtype, "sum", size))
    for op in ops_of(dtype):
        result = cases.reduced(dtype, op, 3)
        assert result.dtype == dtype
        assert len(result.unique()) > 1, op


def test_average_and_product():
    average = cases.reduced(torch.float64, "avg", 3)
    assert (average * 3).round().equal(cases.reduced(torch.float64, "sum", 3))
    assert set(cases.reduced(torch.int8, "prod", 7).tolist()) == {1, 2}
    assert cases.tolerance(torch.float32, "sum") == 0  # averages alone are rounded
    assert 0 < cases.tolerance(torch.bfloat16, "avg") < 0.1


@pytest.mark.parametrize("count", [1, 7, cases.PERIOD, 3 * cases.PERIOD + 5])
def test_a_buffer_is_the_pattern_again_and_again(count):
    numbers, x = cases.pattern(torch.float32, "sum", 1, 2), torch.empty(count)
    cases.write(x, numbers)
    assert x.equal(numbers.repeat(5)[:count])
    assert cases.first_wrong(x, numbers, 0.0) is None
    x[-1] += 1
    assert cases.first_wrong(x, numbers, 0.0) == count - 1
    x[0] = torch.nan
    assert cases.first_wrong(x, numbers, 1e-6) == 0


def task(verb, rank=0, size=3, dtype=torch.float32):
    return Task(VERBS[verb], dtype, "sum", rank, size)


def test_bus_factors_of_4_ranks():
    factors = {"allreduce": 1.5, "broadcast": 1, "reduce": 1}
    factors |= dict.fromkeys(("reduce_scatter", "allgather", "alltoall"), 0.75)
    assert {verb: VERBS[verb].bus_factor(4) for verb in factors} == factors


def test_sizes_are_whole_slices_of_the_larger_tensor():
    assert [task("allreduce").rounded(num_bytes) for num_bytes in (4, 5)] == [4, 8]
    assert task("allgather").rounded(4) == 12
    assert task("alltoall", dtype=torch.int8).rounded(7) == 9
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
