"""More than 2^31 elements, for real: TORCHMPI_TEST_LARGE=1 torchmpirun -n 2 -m pytest --only-mpi THIS_FILE."""

import os

import pytest
import torch

COUNT = 2**31 + 11


def numbers(rank):
    """Values with a long period that divides no message's length."""
    period = (torch.arange(16_777_213) % 97 + rank).to(torch.uint8)
    return period.repeat(-(-COUNT // len(period)))[:COUNT].clone()


@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(600)
@pytest.mark.skipif("TORCHMPI_TEST_LARGE" not in os.environ, reason="set TORCHMPI_TEST_LARGE=1; takes 10 GiB a rank")
def test_beyond_31_bits(mpi):
    rank, size = mpi.rank(), mpi.size()
    expected = numbers(0).mul_(size).add_(sum(range(size)))
    assert torch.equal(mpi.allreduce(numbers(rank)), expected)
    del expected
    assert torch.equal(mpi.broadcast_async(numbers(rank), 1).wait(), numbers(1))
    x = mpi.sendreceive(numbers(rank), (rank - 1) % size, (rank + 1) % size)
    assert torch.equal(x, numbers((rank - 1) % size))
    gathered = mpi.allgather(x[: COUNT // 2 + rank])
    for rank, part in enumerate(torch.split(gathered, [COUNT // 2 + rank for rank in range(size)])):
        assert torch.equal(part, numbers((rank - 1) % size)[: len(part)])
