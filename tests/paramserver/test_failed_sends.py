"""Sends of updates that fail at the server: raised once, nobody waits for ever, and training goes on."""

import dataclasses
import re
import threading

import pytest
import torch
from served_networks import KINDS, Two, downpour

from torchmpi_py import paramserver as ps
from torchmpi_py.core import communicators, config
from torchmpi_py.errors import CollectiveTimeout, ParameterServerError
from torchmpi_py.paramserver import rules

pytestmark = pytest.mark.mpi
FAILED = r"a send of a, b to .* \(rule 'touchy', options \{'fails': True\}\) has failed: ArithmeticError: touched"


def touchy(shard, payload, memory, *, fails=False):
    if fails:
        raise ArithmeticError("touched")
    shard.add_(payload)


def touchy_downpour(net, **options):
    ps.register_rule("touchy", touchy, num_slots=1)
    return downpour(net, optimizer="touchy", local_update=None, **({"update_frequency": 100} | options))


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


def total(ranks, steps, lost=()):
    return sum(factor_of(rank, step) for rank in ranks for step in steps if (rank, step) not in lost)


@pytest.mark.parametrize("in_groups", [False, True])
def test_raised_by_the_next_update(mpi, size, me, in_groups):
    """Once, for both servers, on its rank or all ranks of its group; all other sends are there."""
    roots = range(0, size, 2) if in_groups else range(size)
    level = mpi.push_communicator(me // 2) if in_groups else None
    net = Two()
    update = touchy_downpour(net, dataparallel_communicator=level, update_frequency=4)
    update.update(0)
    errors = train(update, net, me, range(1, 5), failing=[2] if me == roots[-1] else [])
    assert len(errors) == (me >= roots[-1])
    for error in errors:
        assert re.match(r"update\(4\): a send of a, b" if in_groups else rf"update\([23]\): {FAILED}", error)
    assert train(update, net, me, range(5, 9)) == []
    update.take_result()
    assert net.value() == total(roots, range(1, 9), lost=[(roots[-1], 2)])


@pytest.mark.parametrize("call", ["take_result", "state_dict", "finish", "free"])
def test_raised_at_the_end(size, me, comm, monkeypatch, call):
    """On all ranks by what they do together, else on its rank; the same call goes on after that."""
    monkeypatch.setattr(communicators, "communicator", lambda level: comm)
    last, is_for_all = size - 1, call in ("take_result", "state_dict")
    net = Two()
    update = touchy_downpour(net, send_frequency=2)
    update.update(0)
    assert train(update, net, me, range(1, 4)) == []
    update.optimizer_options["fails"] = me == last
    update.send_rest(update.served)
    if is_for_all or me == last:
        with pytest.raises(ParameterServerError, match=f"{call}: rank {last}: {FAILED}" if is_for_all else FAILED):
            getattr(update, call)()
    getattr(update, call)()
    if call != "free":
        update.take_result()
        assert net.value() == total(range(size), range(1, 4), lost=[(last, 3)])
        update.free()
    assert update.served is None


@pytest.mark.parametrize(
    ("kind", "leave"), [("easgd", False), ("difference", True), ("ssp", False), ("ssp", True), ("easgd", True)]
)
def test_every_kind(mpi, monkeypatch, kind, leave):
    """A rule that raises, or ends the program, on the last rank in the first step."""
    if mpi.num_nodes() > 1:
        pytest.skip("the rank that has the shard applies the rule there, for all that send")

    def fail(shard, payload, **options):
        if not shard.dtype.is_floating_point:  # the clocks
            shard.add_(payload)
        else:
            raise SystemExit("broken") if leave else ArithmeticError("broken")

    net = torch.nn.Linear(3, 2)
    is_last = mpi.rank() == mpi.size() - 1
    update = KINDS[kind](net, **({} if kind == "ssp" else {"update_frequency": 1}))
    update.update(0)
    errors = []
    for step in range(1, 4):
        with torch.no_grad():
            net.weight += step
        with monkeypatch.context() as patched:
            for name in ("add", "scaled_add") if step == 1 and is_last else ():
                patched.setitem(rules._rules, name, rules.Rule(fail))
            try:
                update.update(step)
            except ParameterServerError as error:
                errors.append(str(error))
    assert len(errors) == is_last
    for error in errors:
        assert re.search(r"a send of weight, bias .* \(rule '\w*add', .*(SystemExit|ArithmeticError): broken", error)
    update.take_result()
    mpi.nn.check_with_allreduce(net)


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
