"""Exchange of differences: against a model of server and workers, between groups, with Hogwild inside them."""

import pytest
import torch
from served_networks import Two, served, served_value

from torchmpi_py import paramserver as ps

pytestmark = pytest.mark.mpi


def model(size, num_steps, period, ahead):
    """Workers that walk rank + 1 per step, and exchange all at the same time. The server begins at 0."""
    server, base = 0.0, [0.0] * size
    x, sent = [10.0 * rank for rank in range(size)], [0.0] * size
    fetched = [0.0] * size

    def send():
        nonlocal server, sent, fetched
        sent = list(x)
        server += sum(now - then for now, then in zip(x, base, strict=True)) / size
        fetched = [server] * size

    if ahead == period:
        send()
    for step in range(1, num_steps + 1):
        x = [now + rank + 1 for rank, now in enumerate(x)]
        if (step + ahead) % period == 0 and ahead < period:
            send()
        if step % period == 0:
            x = [now + new - then for now, new, then in zip(x, fetched, sent, strict=True)]
            base = list(fetched)
            if ahead == period:
                send()
    return x, server


class Together(ps.DifferenceUpdate):
    """Nobody fetches before all have sent, so that the result is one and the same in every run."""

    def __init__(self, mpi, *args, **options):
        super().__init__(*args, **options)
        self.mpi = mpi

    def prefetch(self, served):
        super().prefetch(served)
        served.fetching[0].wait()
        self.mpi.barrier()
        ps.prefetch_tensors(served)[0].wait()
        self.mpi.barrier()


@pytest.mark.parametrize("ahead", [0, 2, 4])
def test_it_is_the_model(mpi, size, me, ahead):
    """What is learned between sending and integrating is kept."""
    net = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(net.weight, 10.0 * me)
    update = Together(mpi, net, init_delay=0, update_frequency=4, prefetch=ahead)
    update.update(0)
    for step in range(1, 14):
        with torch.no_grad():
            net.weight.add_(me + 1)
        update.update(step)
    x, server = model(size, 13, 4, ahead)
    mpi.barrier()
    for values, expected in ((net.weight.detach(), x[me]), (served(update), server)):
        torch.testing.assert_close(values, torch.full_like(values, expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shares_memory", [False, True])
def test_groups(mpi, shares_memory):
    """Without waiting for anybody nothing is lost: in the end the server has what all have done, once."""
    level = mpi.push_communicator(mpi.rank() // 2)
    group = mpi.communicator(level)
    net = Two()
    hogwild = ps.Hogwild(net, comm=group) if shares_memory else None
    options = {"dataparallel_communicator": level, "shares_memory": shares_memory}
    update = ps.DifferenceUpdate(net, scale=1.0, init_delay=0, update_frequency=3, prefetch=1, **options)
    update.update(0)
    for step in range(1, 13):
        if group.rank == 0 or not shares_memory:
            net.move(1)
        update.update(step)
        if not shares_memory and step % 3 == 0:
            with mpi.at(level):
                mpi.nn.check_with_allreduce(net)
    mpi.barrier()
    if update.is_root:  # what was done since the last exchange
        update.prefetch(update.served)
        mpi.wait_all(update.served.fetching)
    mpi.barrier()
    assert served_value(update) == 12.0 * ((mpi.size() + 1) // 2)
    mpi.barrier()
    if hogwild is not None:
        hogwild.free()
