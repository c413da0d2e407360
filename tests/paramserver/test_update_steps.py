"""What an update does from its first step to its result: order, what is left at the end, what it refuses."""

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import ParameterServerError, RanksDisagree

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


class Two(torch.nn.Module):
    """Parameters of two dtypes, of one value."""

    def __init__(self, value=0.0):
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((3,), value))
        self.b = torch.nn.Parameter(torch.full((2, 2), value, dtype=torch.float64))

    def set_gradient(self, value):
        for p in self.parameters():
            p.grad = torch.full_like(p, value)

    def move(self, by):
        with torch.no_grad():
            for p in self.parameters():
                p += by

    def value(self):
        """Of all its numbers."""
        values = torch.cat([p.detach().double().view(-1) for p in self.parameters()])
        assert (values == values[0]).all()
        return values[0].item()


def server_value(update):
    values = torch.cat([pack.server.receive().wait().double() for pack in update.served.packs])
    assert (values == values[0]).all()
    return values[0].item()


def downpour(net, **options):
    return ps.DownpourUpdate(net, init_delay=0, **({"local_update": lambda g: g.mul_(-1)} | options))


@pytest.mark.parametrize(("update_frequency", "send_frequency"), [(1, 1), (5, 5), (5, 1)])
def test_downpour_with_one_worker_is_sgd(mpi, update_frequency, send_frequency):
    """All ranks are one worker. With prefetch=0 it gets back what it has just sent, its last steps included."""
    net = Two(1.0)
    update = downpour(
        net,
        dataparallel_communicator=0,
        update_frequency=update_frequency,
        send_frequency=send_frequency,
        local_update=lambda g: g.mul_(-0.5),
    )
    assert update.num_workers == 1
    update.update(0)
    for step in range(1, 12):
        net.set_gradient(net.value())
        net.move(-0.5 * net.value())
        update.update(step)
        assert net.value() == 0.5**step
    update.free()


def test_downpour_sends_what_is_left(mpi):
    """8 steps, and a send every 5; the rest comes with finish, and with it alone."""
    net = Two()
    update = downpour(net, update_frequency=100, send_frequency=5)
    for step in range(9):
        net.set_gradient(1.0)
        update.update(step)
    update.finish()
    update.finish()
    mpi.barrier()
    assert server_value(update) == -8 * mpi.size()
    mpi.barrier()
    update.free()
    assert update.worker_state()["sums"] == []


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_difference_sends_what_is_left(mpi, prefetch):
    """Also what an exchange that is not over has not sent; after the result it goes on as if nothing had been."""
    size, me = mpi.size(), mpi.rank()
    net = Two()
    update = ps.DifferenceUpdate(net, init_delay=0, update_frequency=5, prefetch=prefetch, scale=1.0)
    update.update(0)
    total = size * (size + 1) / 2
    for step in range(1, 10):
        net.move(me + 1)
        update.update(step)
    update.finish()
    update.finish()
    mpi.barrier()
    assert server_value(update) == 9 * total
    mpi.barrier()
    update.take_result()
    assert net.value() == 9 * total
    for step in range(10, 13):
        net.move(me + 1)
        update.update(step)
    update.take_result()
    assert net.value() == 12 * total
    update.free()
    assert update.worker_state() == {"base": [], "when_sent": []}


def test_what_local_update_returns_is_taken(mpi):
    net = Two()
    update = downpour(net, update_frequency=100, local_update=lambda g: -2 * g)
    for step in range(4):
        net.set_gradient(1.0)
        update.update(step)
    update.take_result()
    assert net.value() == -6 * mpi.size()
    update.free()
    update = downpour(net, local_update=lambda g: g.sum())
    update.update(0)
    with pytest.raises(ValueError, match=r"local_update returned shape \(\) for a sum of shape \(3,\)"):
        update.update(1)
    update.free()


def test_gradients_that_downpour_refuses(mpi):
    """None at all, and such as are not finite; those are dropped."""
    net = Two()
    update = downpour(net, update_frequency=100, send_frequency=2)
    update.update(0)
    with pytest.raises(ParameterServerError, match=r"call update before optimizer\.zero_grad"):
        update.update(1)
    net.set_gradient(1.0)
    net.b.grad[1, 1] = float("nan")
    with pytest.raises(ParameterServerError, match="the last 1 gradients is not finite, and was dropped"):
        update.update(2)
    for step in range(3, 5):
        net.set_gradient(1.0)
        update.update(step)
    update.take_result()
    assert net.value() == -2 * mpi.size()
    update.free()


KINDS = {
    "downpour": downpour,
    "easgd": lambda net, **options: ps.EASGDUpdate(net, init_delay=0, **options),
    "difference": lambda net, **options: ps.DifferenceUpdate(net, init_delay=0, **options),
    "ssp": lambda net, **options: ps.StaleSynchronousUpdate(net, init_delay=0, staleness=1, **options),
}


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_result(mpi, kind, in_groups):
    """The same on all ranks, and what the server has."""
    level = mpi.push_communicator(mpi.rank() // 2) if in_groups else None
    net = torch.nn.Linear(3, 2)
    update = KINDS[kind](net, dataparallel_communicator=level)
    for step in range(4):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        if not in_groups:
            with torch.no_grad():
                net.weight += 0.1 * torch.randn(2, 3)
        update.update(step)
    update.take_result()
    mpi.nn.check_with_allreduce(net)
    values = update.served.packs[0].server.receive().wait()
    assert torch.equal(values, torch.nn.utils.parameters_to_vector(net.parameters()).detach())
    mpi.barrier()
    update.free()
    with pytest.raises(ParameterServerError, match=r"take_result: this \w+ was freed"):
        update.take_result()


def test_too_few_steps(mpi):
    """Finish and free do nothing then, and nobody hangs."""
    update = ps.EASGDUpdate(Two(), init_delay=5)
    for step in range(mpi.rank() % 2 + 1):
        update.update(step)
    with pytest.raises(ParameterServerError, match=r"seeded in step 5 \(init_delay\), which was not reached"):
        update.take_result()
    update.finish()
    update.free()


def test_steps_go_up(mpi):
    update = ps.EASGDUpdate(Two(), init_delay=1)
    for step in range(3):
        update.update(step)
    for step in (2, 0):
        with pytest.raises(ParameterServerError, match=rf"update\({step}\): it was called for step 2 already"):
            update.update(step)
    update.free()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_network_that_changes(mpi, kind):
    """Told at the next integration."""
    net = torch.nn.Linear(3, 2)
    options = {} if kind == "ssp" else {"update_frequency": 1}
    update = KINDS[kind](net, **options)
    update.update(0)
    net.bias.requires_grad_(False)
    net.weight.grad = torch.zeros(2, 3)
    if kind == "ssp":
        update.update(1)  # it fetches every second step
    with pytest.raises(ParameterServerError, match="does not train the parameters any more"):
        update.update(2)
    update.free()


def test_ranks_that_disagree(mpi):
    """Told on all of them, when the update is made."""
    if mpi.size() == 1:
        pytest.skip("one rank cannot disagree")
    me = mpi.rank()
    for option in ("init_delay", "update_frequency", "prefetch", "send_frequency"):
        with pytest.raises(RanksDisagree, match=f"DownpourUpdate: {option} by rank"):
            ps.DownpourUpdate(Two(), local_update=len, **{option: 1 + me})
    with pytest.raises(RanksDisagree, match="the kind of update by rank"):
        (downpour if me else KINDS["easgd"])(Two())
    with mpi.split(0):
        level = mpi.push_communicator(0)
        with pytest.raises(RanksDisagree, match="DifferenceUpdate: shares_memory by rank"):
            ps.DifferenceUpdate(Two(), dataparallel_communicator=level, shares_memory=me == 0)
    makes = [
        downpour,
        KINDS["easgd"],
        KINDS["ssp"],
        lambda net: ps.SynchronousUpdate(net, lr=0.1),
    ]
    for make in makes:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        net[min(me, 1)].weight.requires_grad_(False)
        with pytest.raises(
            RanksDisagree, match=r"rank 1 trains other .* number 0 is 0.weight \[2, 2\] .*, and 1.weight"
        ):
            make(net)


def test_a_worker_on_both_sides(mpi):
    """A group has to lie in one level of sharding as a whole."""
    if mpi.size() == 1:
        pytest.skip("takes two ranks")
    level = mpi.push_communicator(mpi.rank() // 2 if mpi.size() > 2 else mpi.rank())
    with pytest.raises(ValueError, match="not all of which are among"):
        ps.EASGDUpdate(Two(), sharding_communicator=level, dataparallel_communicator=0)
