"""Groups of ranks as workers: who counts, and who talks to the server."""

import pytest
import torch

from torchmpi_py import paramserver as ps

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


class Place(torch.nn.Module):
    def __init__(self, start):
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor([float(start), -2.0 * start], dtype=torch.float64))


def test_easgd_moves_by_beta_over_the_workers(mpi):
    """To rounding, for workers and centre; their sum stays what it is."""
    me, beta = mpi.rank(), 0.5
    level = mpi.push_communicator(me // 2)
    group = me // 2
    net = Place(10 * group + 1)
    update = ps.EASGDUpdate(
        net, dataparallel_communicator=level, init_delay=0, update_frequency=1, prefetch=1, beta=beta
    )
    workers = [
        torch.tensor([10.0 * one + 1, -20.0 * one - 2], dtype=torch.float64) for one in range(update.num_workers)
    ]
    centre = workers[0].clone()
    whole = sum(workers) + centre
    update.update(0)
    for step in range(1, 5):
        if update.is_root:  # all fetch, before anybody sends
            ps.prefetch_tensors(update.served)[0].wait()
        mpi.barrier()
        update.update(step)
        update.served._finish_sends()
        mpi.barrier()
        moves = [beta / len(workers) * (centre - one) for one in workers]
        workers = [one + move for one, move in zip(workers, moves, strict=True)]
        centre = centre - sum(moves)
        torch.testing.assert_close(net.x.detach(), workers[group], rtol=0, atol=1e-12)
        served = update.served.packs[0].server.receive().wait()
        torch.testing.assert_close(served, centre, rtol=0, atol=1e-12)
        own = net.x.detach() if update.is_root else torch.zeros(2, dtype=torch.float64)
        torch.testing.assert_close(mpi.allreduce(own.clone()) + served, whole, rtol=0, atol=1e-6)
    update.free()


@pytest.mark.parametrize("one_worker", [False, True])
def test_downpour_sends_once_a_group(mpi, one_worker):
    """The level of sharding as the worker is one worker of all ranks."""
    level = 0 if one_worker else mpi.push_communicator(mpi.rank() // 2)
    net = Place(0)
    update = ps.DownpourUpdate(
        net, dataparallel_communicator=level, init_delay=0, update_frequency=50, local_update=lambda g: g
    )
    assert update.num_workers == (1 if one_worker else (mpi.size() + 1) // 2)
    assert update.num_workers == mpi.size() or mpi.allreduce(int(update.is_root)) == update.num_workers
    for step in range(6):
        net.x.grad = torch.ones(2, dtype=torch.float64)
        update.update(step)
    assert bool(update.worker_state()["sums"]) == update.is_root
    update.take_result()
    assert net.x.tolist() == [5.0 * update.num_workers] * 2
    update.free()
