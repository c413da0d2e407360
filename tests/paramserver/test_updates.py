"""Lists of tensors, and Downpour on any number of ranks: what is sent when, and what comes back."""

import pytest
import torch
from served_networks import Two, downpour, served, served_value, wait_for_sends

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import ParameterServerError

pytestmark = pytest.mark.mpi


def tensors(rank):
    """Several shapes and dtypes, one tensor without elements."""
    shapes = [(3, 4), (7,), (0,), (2, 1, 5), ()]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32]
    return [
        (torch.arange(torch.Size(shape).numel()).view(shape) + 10 * rank).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def test_lists(mpi, size, me):
    """One server a dtype; rank 0's values; fetched into buffers, and from there wherever the function says."""
    mine = tensors(me)
    lists = ps.init_tensors(mine)
    assert len(lists.packs) == 2
    assert all(torch.equal(x, y) for x, y in zip(mine, tensors(me), strict=True))
    ps.integrate_tensors(lists, lambda fetched, x: x.copy_(fetched))
    assert all(torch.equal(x, y) for x, y in zip(mine, tensors(0), strict=True))
    mpi.barrier()
    updates = [torch.ones_like(x) for x in mine]
    for _ in range(3):
        mpi.wait_all(ps.send_tensors(lists, updates, "add", lambda update: update.mul_(me + 1)))
    assert all((update == 1).all() for update in updates)
    mpi.barrier()
    mpi.wait_all(ps.prefetch_tensors(lists))
    ps.integrate_tensors(lists, lambda fetched, x: x.copy_(fetched))
    added = 3 * size * (size + 1) // 2
    assert all(torch.equal(x, y + added) for x, y in zip(mine, tensors(0), strict=True))
    with pytest.raises(ValueError, match="expected 5 updates, found 1; pass one update per tensor"):
        ps.send_tensors(lists, updates[:1])


def test_a_failed_send_of_a_list_is_forgotten_by_the_next(mpi):
    """And no part of a list is sent unless all of it can be."""

    def once(shard, payload):
        raise LookupError("once")

    ps.register_rule("once", once)
    with mpi.split(mpi.rank()) as alone:
        floats, whole = torch.zeros(3), torch.zeros(2, dtype=torch.int64)
        lists = ps.init_tensors([floats, whole], comm=alone)
        ones = [torch.ones(3), torch.ones(2, dtype=torch.int64)]
        for handle in ps.send_tensors(lists, ones, "once"):
            with pytest.raises(LookupError):
                handle.wait()
        mpi.wait_all(ps.send_tensors(lists, ones))
        with pytest.raises(ValueError, match="needs floating-point"):
            ps.send_tensors(lists, ones, "elastic", weight=0.5)
        for wrong in ([torch.ones(1), ones[1]], [ones[0].double(), ones[1]]):
            with pytest.raises(ValueError, match="update 0 has shape"):
                ps.send_tensors(lists, wrong)
        ps.integrate_tensors(lists, lambda fetched, x: x.copy_(fetched))
        assert (floats.tolist(), whole.tolist()) == ([1, 1, 1], [1, 1])
        other = ps.init_tensors([torch.zeros(2, dtype=torch.int64), torch.zeros(3)], comm=alone)
        with pytest.raises(ValueError, match=r"the state was saved for tensors of shapes \[\[3\], \[2\]\]"):
            other.load_state_dict(lists.state_dict())
        ps.free_all()


@pytest.mark.parametrize("workers", ["each rank", "pairs", "all ranks"])
def test_what_downpour_sends(mpi, workers):
    """The sums of the steps since the server was seeded, of every root, no step twice; the rest with finish."""
    me = mpi.rank()
    level = {"each rank": None, "pairs": mpi.push_communicator(me // 2), "all ranks": 0}[workers]
    roots = {"each rank": range(mpi.size()), "pairs": range(0, mpi.size(), 2), "all ranks": range(1)}[workers]
    net = Two()
    options = {"update_frequency": 100, "send_frequency": 4, "local_update": lambda g: g.mul_(10)}
    update = downpour(net, dataparallel_communicator=level, **options)
    assert (update.num_workers, update.is_root) == (len(roots), me in roots)
    for step in range(11):
        net.set_gradient(2.0**step + (me if workers == "each rank" else 0))
        update.update(step)
    for last in (8, 10):  # sent every fourth step, and then at the end
        if last == 10:
            update.finish()
            update.finish()
        wait_for_sends(mpi, update)
        steps = sum(2**step for step in range(1, last + 1)) * len(roots)
        ranks = last * sum(roots) if workers == "each rank" else 0
        assert served_value(update) == 10 * (steps + ranks)
        mpi.barrier()
    update.take_result()
    assert net.value() == 10 * (steps + ranks)
    update.free()
    assert update.worker_state()["sums"] == []


@pytest.mark.parametrize(("update_frequency", "send_frequency"), [(1, 1), (5, 5), (5, 1)])
def test_downpour_with_one_worker_is_sgd(mpi, update_frequency, send_frequency):
    """All ranks are one worker. With prefetch=0 it gets back what it has just sent, its last steps included."""
    net = Two(1.0)
    options = {"update_frequency": update_frequency, "send_frequency": send_frequency}
    update = downpour(net, dataparallel_communicator=0, local_update=lambda g: g.mul_(-0.5), **options)
    update.update(0)
    for step in range(1, 12):
        net.set_gradient(net.value())
        net.move(-0.5 * net.value())
        update.update(step)
        assert net.value() == 0.5**step


def test_prefetching_as_early_as_can_be(mpi):
    """With prefetch equal to update_frequency: what comes in is what the server had at the integration before."""
    net = Two()
    net.set_gradient(1.0)
    update = downpour(net, update_frequency=2, prefetch=2, local_update=lambda g: g)
    seen = []
    for step in range(7):
        mpi.barrier()
        update.update(step)
        served(update, 0)  # after all that was asked
        served(update, 1)
        seen.append(net.a[0].item() / mpi.size())
    assert seen[:4] == [0, 0, 0, 0]  # fetched in step 0, where nothing had been sent
    assert seen[4] == seen[5]
    assert 1 < seen[4] <= 2 < seen[6] <= 4  # fetched in step 2, and in step 4, when others may not yet have sent


def test_downpour_with_an_optimizer_at_the_server(mpi):
    """One step of Adagrad for each sum that a worker sends."""
    size = mpi.size()
    net = torch.nn.Linear(3, 2)
    mpi.nn.synchronize_parameters(net)
    weight, bias = (p.detach().clone() for p in net.parameters())
    weight.requires_grad_()
    options = {"init_delay": 0, "update_frequency": 100, "send_frequency": 2}
    update = ps.DownpourUpdate(net, optimizer="adagrad", optimizer_options={"lr": 0.5}, **options)
    adagrad = torch.optim.Adagrad([weight], lr=0.5)
    for step in range(5):
        net.weight.grad = torch.full_like(net.weight, float(step))  # and none for the bias
        update.update(step)
    for sent in [3.0] * size + [7.0] * size:
        weight.grad = torch.full_like(weight, sent)
        adagrad.step()
    update.finish()
    mpi.barrier()
    if size == 1:  # with others the order of the sends is open
        torch.testing.assert_close(served(update)[:6], weight.detach().view(-1))
    state = update.served.packs[0].server.state_dict()
    assert state["slots"][0][:6].tolist() == [size * (3.0**2 + 7.0**2)] * 6
    assert torch.equal(served(update)[6:], bias)


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


def test_gradients_that_downpour_refuses(mpi):
    """None at all, and such as are not finite; those are dropped, as is one from before a parameter was frozen."""
    net = Two()
    update = downpour(net, update_frequency=100, send_frequency=2)
    update.update(0)
    with pytest.raises(ParameterServerError, match="call update after backward and before zero_grad"):
        update.update(1)
    net.set_gradient(1.0)
    net.b.grad[1, 1] = float("nan")
    with pytest.raises(ParameterServerError, match=r"number of steps: 1\) is not finite, and was dropped"):
        update.update(2)
    for step in range(3, 5):
        net.set_gradient(1.0)
        update.update(step)
    net.b.requires_grad_(False)
    for step in range(5, 7):
        net.a.grad = torch.arange(1.0, 4)
        update.update(step)
    update.take_result()
    assert net.a.tolist() == [-4.0 * mpi.size() * n for n in range(1, 4)]
    assert net.b.flatten().tolist() == [-2.0 * mpi.size() * n for n in range(1, 5)]
