"""Sends of updates that fail at the server: raised once, nobody waits for ever, and training goes on."""

import dataclasses
import re
import threading

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.core import communicators, config
from torchmpi_py.errors import CollectiveTimeout, ParameterServerError
from torchmpi_py.paramserver import rules

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


class Two(torch.nn.Module):
    """Parameters of two dtypes, so of two servers."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(5))
        self.b = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))

    def set_gradient(self, factor):
        for p in self.parameters():
            p.grad = factor * torch.arange(1.0, p.numel() + 1, dtype=p.dtype).view_as(p)

    def factor(self):
        """The factor that gives the parameters, as of ``set_gradient``."""
        factors = torch.cat([p.detach().flatten() / torch.arange(1.0, p.numel() + 1) for p in self.parameters()])
        assert (factors == factors[0]).all()
        return factors[0].item()


def touchy(shard, payload, memory, *, fails=False):
    if fails:
        raise ArithmeticError("touched")
    shard.add_(payload)


def downpour(net, **options):
    ps.register_rule("touchy", touchy, num_slots=1)
    return ps.DownpourUpdate(net, optimizer="touchy", init_delay=0, **({"update_frequency": 100} | options))


def factor_of(rank, step):
    return float(10**rank * 2**step)


def train(update, net, me, steps, failing=()):
    """The errors of the steps; ``failing`` are those whose send fails."""
    errors = []
    for step in steps:
        net.set_gradient(factor_of(me, step))
        update.optimizer_options["fails"] = step in failing
        try:
            update.update(step)
        except ParameterServerError as error:
            errors.append(str(error))
    return errors


FAILED = r"a send of a, b to .* by rule 'touchy', options \{'fails': True\}, has failed: ArithmeticError: touched"


def total(ranks, steps, lost=()):
    return sum(factor_of(rank, step) for rank in range(ranks) for step in steps if (rank, step) not in lost)


def test_raised_by_the_next_update(mpi):
    """Once, for both servers, on its rank; all other sends are there."""
    size, me = mpi.size(), mpi.rank()
    last = size - 1
    net = Two()
    update = downpour(net)
    update.update(0)
    errors = train(update, net, me, range(1, 3), failing=[1] if me == last else [])
    assert len(errors) == (me == last)
    if errors:
        assert re.match(rf"update\([12]\): {FAILED}", errors[0])
    assert train(update, net, me, range(3, 6)) == []
    update.take_result()
    assert net.factor() == total(size, range(1, 6), lost=[(last, 1)])
    update.free()


@pytest.mark.parametrize("call", ["take_result", "state_dict"])
def test_raised_on_all_ranks(mpi, comm, monkeypatch, call):
    """By what they do together at the end, on one node and as if on two; the same call goes on after that."""
    monkeypatch.setattr(communicators, "communicator", lambda level: comm)
    size, me = mpi.size(), mpi.rank()
    last = size - 1
    net = Two()
    update = downpour(net, send_frequency=2)
    update.update(0)
    assert train(update, net, me, range(1, 4)) == []
    update.optimizer_options["fails"] = me == last
    update.send_rest(update.served)
    with pytest.raises(ParameterServerError, match=f"{call}: rank {last}: {FAILED}"):
        getattr(update, call)()
    getattr(update, call)()
    update.take_result()
    assert net.factor() == total(size, range(1, 4), lost=[(last, 3)])
    update.free()


@pytest.mark.parametrize("call", ["finish", "free"])
def test_raised_by_what_ends_a_worker(mpi, call):
    """On its rank, where nobody waits for the others."""
    size, me = mpi.size(), mpi.rank()
    last = size - 1
    net = Two()
    update = downpour(net, send_frequency=2)
    update.update(0)
    assert train(update, net, me, range(1, 4)) == []
    update.optimizer_options["fails"] = me == last
    update.send_rest(update.served)
    if me == last:
        with pytest.raises(ParameterServerError, match=FAILED):
            getattr(update, call)()
    getattr(update, call)()
    if call == "finish":
        update.take_result()
        assert net.factor() == total(size, range(1, 4), lost=[(last, 3)])
        update.free()
    assert update.served is None


def test_raised_in_a_group(mpi):
    """On all ranks of the last group, in the step in which they share parameters, which the root does not leave out."""
    size, me = mpi.size(), mpi.rank()
    last_root = (size - 1) // 2 * 2
    level = mpi.push_communicator(me // 2)
    net = Two()
    update = downpour(net, dataparallel_communicator=level, update_frequency=4)
    update.update(0)
    errors = train(update, net, me, range(1, 5), failing=[2] if me == last_root else [])
    assert len(errors) == (me >= last_root)
    assert all(
        error.startswith("update(4): a send of a, b to the parameter server by rule 'touchy'") for error in errors
    )
    assert train(update, net, me, range(5, 9)) == []
    update.take_result()
    sent = [(root, step) for root in range(0, size, 2) for step in range(1, 9) if (root, step) != (last_root, 2)]
    assert net.factor() == sum(factor_of(*one) for one in sent)
    update.free()


KINDS = {
    "easgd": lambda net: ps.EASGDUpdate(net, init_delay=0, update_frequency=1),
    "difference": lambda net: ps.DifferenceUpdate(net, init_delay=0, update_frequency=1),
    "ssp": lambda net: ps.StaleSynchronousUpdate(net, init_delay=0, staleness=1),
}


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind(mpi, monkeypatch, kind, leave):
    """A rule that raises, or ends the program, on the last rank in the first step."""
    if mpi.num_nodes() > 1:
        pytest.skip("the rank that has the shard applies the rule there, for all that send")

    def fail(shard, payload, **options):
        if not shard.dtype.is_floating_point:  # the clocks
            shard.add_(payload)
        elif leave:
            raise SystemExit("broken")
        else:
            raise ArithmeticError("broken")

    net = torch.nn.Linear(3, 2)
    update = KINDS[kind](net)
    update.update(0)
    errors = []
    for step in range(1, 4):
        with torch.no_grad():
            net.weight += step
        with monkeypatch.context() as patched:
            for name in ("add", "scaled_add") if step == 1 and mpi.rank() == mpi.size() - 1 else ():
                patched.setitem(rules._rules, name, rules.Rule(fail))
            try:
                update.update(step)
            except ParameterServerError as error:
                errors.append(str(error))
    assert len(errors) == (mpi.rank() == mpi.size() - 1)
    for error in errors:
        assert re.search(r"a send of weight, bias .* by rule '\w*add', .*(SystemExit|ArithmeticError): broken", error)
    update.take_result()
    mpi.nn.check_with_allreduce(net)
    update.free()


def test_a_deadline_is_no_failure(mpi, monkeypatch):
    """While a send is under way, what it sends stays as it is."""
    may_go_on = threading.Event()

    def wait(shard, payload):
        may_go_on.wait()
        shard.add_(payload)

    ps.register_rule("wait", wait)
    with mpi.split(mpi.rank()) as alone:
        served = ps.init_tensors([torch.zeros(4), torch.zeros(2, dtype=torch.float64)], comm=alone)
        first = [torch.arange(1.0, 5), torch.arange(5.0, 7, dtype=torch.float64)]
        ps.send_tensors(served, first, "wait")
        try:
            with monkeypatch.context() as patched:
                patched.setattr(config, "current", dataclasses.replace(config.current, deadline_seconds=0.05))
                patched.setattr(config, "can_raise", True)
                with pytest.raises(CollectiveTimeout):
                    ps.send_tensors(served, [100 * x for x in first], "wait")
        finally:
            may_go_on.set()
        mpi.wait_all(ps.send_tensors(served, [1000 * x for x in first], "wait"))
        got = []
        ps.integrate_tensors(served, lambda fetched, x: got.append(fetched.tolist()))
        assert got == [[1001 * n for n in (1.0, 2.0, 3.0, 4.0)], [1001 * n for n in (5.0, 6.0)]]
        served.free()


def test_a_gradient_from_before_a_parameter_was_frozen(mpi):
    """Downpour does not go on adding it."""
    size = mpi.size()
    net = Two()
    update = ps.DownpourUpdate(net, local_update=lambda g: g, init_delay=0, update_frequency=100)
    update.update(0)
    net.set_gradient(1.0)
    update.update(1)
    net.b.requires_grad_(False)
    for step in range(2, 5):
        net.a.grad = torch.arange(1.0, 6)
        update.update(step)
    update.take_result()
    assert net.a.tolist() == [4.0 * size * n for n in range(1, 6)]
    assert net.b.flatten().tolist() == [1.0 * size * n for n in range(1, 7)]
    update.free()
