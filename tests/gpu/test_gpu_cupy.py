"""cupy's arrays in verbs: their memory is used, and cupy's stream and torch's are ordered."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)
cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("flavour", ["staged", "cudaipc"])
@pytest.mark.parametrize("count", [7, 1_000_003])
def test_arrays(mpi, size, me, count, flavour):
    """On a stream of cupy's own, on which values are still computed at the call, and results are read at once."""
    total = size * (size - 1) // 2
    with cupy.cuda.Device(mpi.device().index), cupy.cuda.Stream(non_blocking=True):
        for turn in range(10):
            x = cupy.arange(count, dtype=cupy.float64) % 100
            for _ in range(50):
                x = cupy.sqrt(x * x)  # takes a while
            x += me + turn
            address = x.data.ptr
            found = mpi.allreduce(x, flavour=flavour)
            assert found is x
            assert found.data.ptr == address
            wanted = (cupy.arange(count) % 100 + turn) * size + total
            assert bool(cupy.allclose(found, wanted))
            y = cupy.full(count, me + turn, dtype=cupy.float32)
            gathered = mpi.allgather_async(y, flavour=flavour).wait()
            assert isinstance(gathered, cupy.ndarray)
            assert gathered.reshape(size, count)[:, -1].tolist() == [rank + turn for rank in range(size)]
    z = cupy.full(3, me)
    mpi.broadcast(z, root=size - 1, flavour=flavour)
    assert z.tolist() == [size - 1] * 3
