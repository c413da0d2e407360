"""Parameter servers with tensors on GPUs, whose values are still being computed when they are sent."""

import pytest
import torch

from torchmpi_py import paramserver as ps

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

pytestmark = pytest.mark.mpi

COUNT = 300_001
SLOW = 2_000_000  # cycles; about a millisecond


def test_values_that_come_late(mpi, size, me, stream):
    """What was queued before a call is sent; what is received is complete when the handle is."""
    server = ps.init(torch.zeros(COUNT, device="cuda"))
    x = torch.empty(COUNT, device="cuda")
    for turn in range(20):
        torch.cuda._sleep(SLOW)
        x.fill_(turn + me)
        server.send(x).wait()
    mpi.barrier()
    total = sum(20 * rank + 190 for rank in range(size))
    got = torch.empty(COUNT, device="cuda")
    torch.cuda._sleep(SLOW)
    got.fill_(-1)
    server.receive(got).wait()
    assert (got == total).all()
    strided = torch.zeros(COUNT, 2, device="cuda")[:, 0]
    assert (server.receive(strided).wait() == total).all()
    assert (server.receive().wait() == total).all()
    server.free()


def test_updates(mpi):
    """Lists on the GPU: packed there, one copy each way."""
    net = torch.nn.Linear(100, 10).cuda()
    served = ps.init_tensors(list(net.parameters()), optimizer="adam")
    ps.send_tensors(served, [torch.ones_like(p) for p in net.parameters()], "adam", lr=0.1)
    ps.integrate_tensors(served, lambda fetched, p: p.copy_(fetched))
    assert all(p.is_cuda and p.isfinite().all() for p in net.parameters())
    served.free()
