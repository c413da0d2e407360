import functools

import pytest
import torch

from torchmpi_py.bench import exact_values
from torchmpi_py.bench.command_line import DTYPES
from torchmpi_py.core.tensors import ops_of


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_sums_are_exact_in_any_order(dtype, size):
    brought = [exact_values.pattern(dtype, "sum", rank, size) for rank in range(size)]
    forward = functools.reduce(torch.add, brought)
    backward = functools.reduce(torch.add, reversed(brought))
    assert forward.equal(backward)
    assert forward.equal(exact_values.reduced(dtype, "sum", size))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_op_has_a_reduction_of_the_dtype(dtype):
    for op in ops_of(dtype):
        result = exact_values.reduced(dtype, op, 3)
        assert result.dtype == dtype
        assert len(result.unique()) > 1, op


def test_average_and_product():
    average = exact_values.reduced(torch.float64, "avg", 3)
    assert (average * 3).round().equal(exact_values.reduced(torch.float64, "sum", 3))
    assert set(exact_values.reduced(torch.int8, "prod", 7).tolist()) == {1, 2}


def test_ranks_and_elements_are_told_apart():
    first, second = (exact_values.pattern(torch.float32, "sum", rank, 2) for rank in range(2))
    assert len(first.unique()) == exact_values.PERIOD
    assert not (first == second).any()


@pytest.mark.parametrize("count", [1, 7, exact_values.PERIOD, 3 * exact_values.PERIOD + 5])
def test_a_buffer_is_the_pattern_again_and_again(count):
    numbers, x = exact_values.pattern(torch.float32, "sum", 1, 2), torch.empty(count)
    exact_values.write(x, numbers)
    assert x.equal(numbers.repeat(5)[:count])
    assert exact_values.first_wrong(x, numbers, 0.0) is None
    x[-1] += 1
    assert exact_values.first_wrong(x, numbers, 0.0) == count - 1
    x[0] = torch.nan
    assert exact_values.first_wrong(x, numbers, 1e-6) == 0


def test_several_periods_at_once_are_the_same_pattern():
    numbers, x = exact_values.pattern(torch.float32, "sum", 1, 2), torch.empty(7 * exact_values.PERIOD + 5)
    exact_values.write(x, numbers.repeat(3))
    assert exact_values.first_wrong(x, numbers, 0.0) is None
    x[4 * exact_values.PERIOD + 9] += 1
    assert exact_values.first_wrong(x, numbers.repeat(3), 0.0) == 4 * exact_values.PERIOD + 9


def test_a_slice_goes_on_where_the_pattern_is():
    numbers, x = exact_values.pattern(torch.int32, "sum", 0, 1), torch.empty(3 * exact_values.PERIOD, dtype=torch.int32)
    exact_values.write(x, numbers)
    for begin in (0, 5, exact_values.PERIOD + 1000):
        assert exact_values.first_wrong(x[begin : begin + 70000], exact_values.shifted(numbers, begin), 0.0) is None


def test_only_averages_are_rounded():
    assert exact_values.tolerance(torch.float32, "sum") == 0
    assert 0 < exact_values.tolerance(torch.bfloat16, "avg") < 0.1
