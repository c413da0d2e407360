"""What an update does from its first step to its result: order, what is left at the end, what it refuses."""

import pytest
import torch
from served_networks import KINDS, Two, downpour, served, served_value

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import ParameterServerError, RanksDisagree

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_difference_sends_what_is_left(mpi, prefetch):
    """Also what an exchange that is not over has not sent; after the result it goes on as if nothing had been."""
    net = Two()
    update = KINDS["difference"](net, update_frequency=5, prefetch=prefetch, scale=1.0)
    total = mpi.size() * (mpi.size() + 1) / 2

    def train(steps):
        for step in steps:
            net.move(mpi.rank() + 1)
            update.update(step)

    update.update(0)
    train(range(1, 10))
    update.finish()
    update.finish()
    mpi.barrier()
    assert served_value(update) == 9 * total
    mpi.barrier()
    update.take_result()
    assert net.value() == 9 * total
    train(range(10, 13))
    update.take_result()
    assert net.value() == 12 * total
    update.free()
    assert update.worker_state() == {"base": [], "when_sent": []}


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_result(mpi, kind, in_groups):
    """The same on all ranks, and what the server has."""
    level = mpi.push_communicator(mpi.rank() // 2) if in_groups else None
    net = torch.nn.Linear(3, 2)
    options = {} if kind == "ssp" else {"update_frequency": 2}
    update = KINDS[kind](net, dataparallel_communicator=level, **options)
    for step in range(4):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        if not in_groups:
            with torch.no_grad():
                net.weight += 0.1 * torch.randn(2, 3)
        update.update(step)
    update.take_result()
    mpi.nn.check_with_allreduce(net)
    assert torch.equal(served(update), torch.nn.utils.parameters_to_vector(net.parameters()).detach())
    mpi.barrier()
    update.free()
    with pytest.raises(ParameterServerError, match=r"take_result: this \w+ was freed"):
        update.take_result()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_network_that_changes(mpi, kind):
    """Told at the next integration."""
    net = Two()
    update = KINDS[kind](net, **({} if kind == "ssp" else {"update_frequency": 2}))
    update.update(0)
    net.b.requires_grad_(False)
    net.set_gradient(0.0)
    update.update(1)
    with pytest.raises(ParameterServerError, match="no longer trains the parameters"):
        update.update(2)


def test_steps_that_are_left_out_or_repeated(mpi):
    """Where the server was not seeded finish and free do nothing, and nobody hangs."""
    early = ps.EASGDUpdate(Two(), init_delay=5)
    for step in range(mpi.rank() % 2 + 1):
        early.update(step)
    with pytest.raises(ParameterServerError, match=r"created in step 5 \(init_delay\), which was not reached"):
        early.take_result()
    with pytest.raises(ParameterServerError, match=r"update\(6\): update\(5\) creates the parameter server"):
        early.update(6)
    early.finish()
    early.free()
    early.free()
    with pytest.raises(ParameterServerError, match=r"update\(5\): this EASGDUpdate was freed"):
        early.update(5)
    update = ps.EASGDUpdate(Two(), init_delay=1)
    for step in range(3):
        update.update(step)
    for step in (2, 0):
        with pytest.raises(ParameterServerError, match=rf"update\({step}\): expected a step after 2"):
            update.update(step)


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        (ValueError, "beta=1", lambda net: ps.EASGDUpdate(net, beta=1)),
        (TypeError, "not accept send_frequency", lambda net: ps.EASGDUpdate(net, send_frequency=3)),
        (TypeError, "not accept send_frequency", lambda net: ps.DifferenceUpdate(net, send_frequency=1)),
        (ValueError, "shares_memory=True", lambda net: ps.DifferenceUpdate(net, shares_memory=True)),
        (TypeError, "local_update=3", lambda net: ps.DownpourUpdate(net, local_update=3)),
        (TypeError, "local_update=None", ps.DownpourUpdate),
        (TypeError, "need an optimizer", lambda net: downpour(net, optimizer_options={"lr": 1})),
        (TypeError, "not valid", lambda net: ps.DownpourUpdate(net, optimizer="adam", optimizer_options={"beta": 1})),
        (ValueError, "staleness=-1", lambda net: ps.StaleSynchronousUpdate(net, staleness=-1)),
        (ValueError, "staleness=True", lambda net: ps.StaleSynchronousUpdate(net, staleness=True)),
        (TypeError, "not accept prefetch", lambda net: ps.StaleSynchronousUpdate(net, staleness=1, prefetch=1)),
        (ValueError, "'lbfgs' is unknown", lambda net: ps.SynchronousUpdate(net, optimizer="lbfgs", lr=1)),
        (TypeError, "not valid", lambda net: ps.SynchronousUpdate(net, optimizer="adam", momentum=1)),
    ],
)
def test_mistakes(mpi, error, words, make):
    with pytest.raises(error, match=words):
        make(Two())


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree(mpi):
    """Told on all of them, when the update is made; also of a group that lies on both sides of a level of sharding."""
    me = mpi.rank()
    for option in ("init_delay", "update_frequency", "prefetch", "send_frequency"):
        with pytest.raises(RanksDisagree, match=f"DownpourUpdate: {option} differs between ranks"):
            ps.DownpourUpdate(Two(), local_update=len, **{option: 1 + me})
    with pytest.raises(RanksDisagree, match="class differs between ranks"):
        KINDS["downpour" if me else "easgd"](Two())
    with pytest.raises(RanksDisagree, match="staleness differs between ranks"):
        ps.StaleSynchronousUpdate(Two(), staleness=me)
    with pytest.raises(RanksDisagree, match="optimizer differs between ranks"):
        ps.SynchronousUpdate(Two(), lr=float(me))
    level = mpi.push_communicator(0)
    with pytest.raises(RanksDisagree, match="DifferenceUpdate: shares_memory differs between ranks"):
        ps.DifferenceUpdate(Two(), dataparallel_communicator=level, shares_memory=me == 0)
    for make in (downpour, KINDS["easgd"], KINDS["ssp"], lambda net: ps.SynchronousUpdate(net, lr=0.1)):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        net[min(me, 1)].weight.requires_grad_(False)
        with pytest.raises(RanksDisagree, match=r"train different .* parameter 0 is 0.weight .* and 1.weight"):
            make(net)
    level = mpi.push_communicator(me // 2 if mpi.size() > 2 else me)
    with pytest.raises(ValueError, match="is not contained in the group of sharding_communicator"):
        ps.EASGDUpdate(Two(), sharding_communicator=level, dataparallel_communicator=0)
