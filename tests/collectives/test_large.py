"""More than 2^31 elements, for real: TORCHMPI_TEST_LARGE=1 torchmpirun -n 2 -m pytest --only-mpi THIS_FILE."""

import os

import pytest
import torch

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "TORCHMPI_TEST_LARGE" not in os.environ, reason="set TORCHMPI_TEST_LARGE=1; takes 10 GiB a rank"
    ),
]
COUNT = 2**31 + 11


def numbers(rank):
    """Values with a long period that divides no message's length."""
    period = (torch.arange(16_777_213) % 97 + rank).to(torch.uint8)
    return period.repeat(-(-COUNT // len(period)))[:COUNT].clone()


def test_beyond_31_bits(mpi):
    x = numbers(mpi.rank())
    expected = numbers(0).mul_(mpi.size()).add_(sum(range(mpi.size())))
    assert torch.equal(mpi.allreduce(x), expected)
    del expected
    x = numbers(mpi.rank())
    assert torch.equal(mpi.broadcast_async(x, 1).wait(), numbers(1))
    x = numbers(mpi.rank())
    mpi.sendreceive(x, (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size())
    assert torch.equal(x, numbers((mpi.rank() - 1) % mpi.size()))
    half = x[: COUNT // 2 + mpi.rank()]
    gathered = mpi.allgather(half)
    parts = torch.split(gathered, [COUNT // 2 + rank for rank in range(mpi.size())])
    for rank, part in enumerate(parts):
        assert torch.equal(part, numbers((rank - 1) % mpi.size())[: len(part)])
