import math

import numpy as np
import pytest

from torchmpi_py.collectives import numbers


def test_a_record_keeps_value_and_type():
    given = [True, False, 0, -5, 2**63 - 1, -(2**63), 1.5, -0.0, math.inf, 1 + 2j, -1j]
    of_numpy = [(np.float32(1.5), 1.5), (np.int8(3), 3), (np.bool_(True), True)]
    for number, expected in [*zip(given, given, strict=True), *of_numpy]:
        back = numbers.from_records(numbers.to_record(number))[0]
        assert type(back) is type(expected)
        assert str(back) == str(expected)


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        ("sum", [1, 2.5], 3.5),
        ("sum", [True, True], 2),
        ("sum", [2**62, 2**62], 2**63),
        ("sum", [1j, 1], 1 + 1j),
        ("avg", [1, 2], 1.5),
        ("prod", [2, 3, 4], 24),
        ("min", [3, 1.5], 1.5),
        ("min", [1.0, math.nan], math.nan),
        ("min", [math.nan, 1.0], math.nan),
        ("max", [3, True], 3),
        ("max", [1.0, math.nan], math.nan),
        ("max", [math.nan, 1.0], math.nan),
        ("band", [6, 3], 2),
        ("bor", [6, 3], 7),
        ("bxor", [6, 3], 5),
        ("land", [6, 0], 0),
        ("lor", [6, 0], 1),
    ],
)
def test_reductions_follow_python(op, values, expected):
    result = numbers.reduce_numbers("allreduce", op, values)
    assert str(result) == str(expected)
    assert type(result) is type(expected)


@pytest.mark.mpi
@pytest.mark.timeout(240)
def test_numbers_through_the_verbs(mpi):
    rank, size = mpi.rank(), mpi.size()
    last = size - 1
    assert mpi.allreduce(rank) == size * last // 2
    assert mpi.allreduce(rank, op="max") == last
    assert mpi.allreduce_async(0.5).wait() == 0.5 * size
    assert mpi.reduce(rank + 1, last) == (size * (size + 1) // 2 if rank == last else rank + 1)
    assert mpi.broadcast(rank if rank != last else 2.5, last) == 2.5
    assert mpi.allgather(rank) == list(range(size))
    assert mpi.gather(rank * 1.0, last) == ([float(r) for r in range(size)] if rank == last else None)
    assert mpi.sendreceive(rank, (rank - 1) % size, (rank + 1) % size) == (rank - 1) % size
    receiving = mpi.recv_async(0, (rank - 1) % size)
    assert mpi.send_async(rank + 0.5, (rank + 1) % size).wait() == rank + 0.5
    assert receiving.wait() == (rank - 1) % size + 0.5
    assert mpi.allreduce(0 if rank else 1.5) == 1.5  # an int meets a float
