"""Data-parallel training of networks and criteria that are not plain stacks of layers."""

import pytest
import torch
from runs import classes, loss_of, train
from support import networks

from torchmpi_py import errors
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

pytestmark = pytest.mark.mpi
both_ways = pytest.mark.parametrize("asynchronous", [False, True])


def network(seed):
    return networks.perceptron(6, 16, 3, seed=seed)


def data(total=30):
    return DatasetIterator(classes(total), 4)


class Scale(torch.nn.Module):
    """A criterion with a parameter and a buffer."""

    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.register_buffer("shift", torch.tensor(factor))

    def forward(self, output, target):
        return loss_of(output * self.factor + self.shift, target)


@both_ways
def test_parameters_and_buffers_of_the_criterion_are_shared_and_trained(mpi, asynchronous):
    criterion = Scale(1.0 + mpi.rank())
    train(network(mpi.rank()), data(), engine=AllReduceSGDEngine(asynchronous=asynchronous), criterion=criterion)
    assert criterion.shift == 1.0
    assert criterion.factor != 1.0
    mpi.nn.check_with_allreduce(criterion)


@both_ways
@pytest.mark.parametrize("moment", ["on_start_epoch", "on_sample"])
def test_a_network_that_grows_is_followed_at_once(mpi, moment, asynchronous):
    net, iterator, seen = torch.nn.Sequential(torch.nn.Linear(6, 3)), data(), {}

    def grow(state):
        if state.t == len(iterator):  # in the second epoch
            torch.manual_seed(100 + mpi.rank())  # the new layer starts out different on each rank
            net.append(torch.nn.Linear(3, 3))
            state.optimizer.add_param_group({"params": net[1].parameters()})
            seen["initial"] = net[1].weight.detach().clone()

    def look(name, of):
        def hook(state):
            if state.t == len(iterator):
                seen[name] = of(net[1].weight).detach().clone()

        return hook

    hooks = {moment: grow, "on_forward": look("weight", lambda w: w), "on_backward": look("gradient", lambda w: w.grad)}
    train(net, iterator, engine=AllReduceSGDEngine(asynchronous=asynchronous, debug=True), maxepoch=3, **hooks)
    assert torch.equal(seen["weight"], mpi.broadcast(seen["initial"]))
    mpi.check_with_allreduce(seen["gradient"])
    mpi.nn.check_with_allreduce(net)
    assert not torch.equal(net[1].weight, seen["weight"])


@pytest.mark.parametrize("dynamicnetwork", [False, True])
@both_ways
def test_parameters_that_only_the_optimizer_holds(mpi, asynchronous, dynamicnetwork):
    net, factor = network(mpi.rank()), torch.nn.Parameter(torch.tensor(1.0 + mpi.rank()))
    started = []
    train(
        net,
        data(),
        engine=AllReduceSGDEngine(asynchronous=asynchronous, dynamicnetwork=dynamicnetwork, debug=True),
        criterion=lambda output, target: loss_of(output * factor, target),
        optimizer=torch.optim.SGD([*net.parameters(), factor], lr=0.2),
        on_start=lambda state: started.append(factor.item()),
    )
    assert started == [1.0]
    assert factor != 1.0
    mpi.check_with_allreduce(factor, "factor")
    mpi.nn.check_with_allreduce(net)


@pytest.mark.mpi(min_size=2)
def test_a_plain_tensor_in_the_optimizer_is_refused(mpi):
    net, factor = network(0), torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([*net.parameters(), factor], lr=0.2)
    with pytest.raises(TypeError, match=r"torch\.nn\.Parameter"):
        train(net, data(), criterion=lambda output, target: loss_of(output * factor, target), optimizer=optimizer)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("moment", ["on_sample", "on_update"])
def test_debug_finds_what_a_hook_spoils(mpi, moment):
    forward_passes = []

    def spoil(state):
        if mpi.rank() == 1:
            with torch.no_grad():
                state.network[2].bias[0] += 1e-6

    hooks = {moment: spoil, "on_forward": forward_passes.append}
    with pytest.raises(errors.RanksDisagree, match=r"network\.2\.bias"):
        train(network(0), data(), engine=AllReduceSGDEngine(debug=True), **hooks)
    assert len(forward_passes) == (moment == "on_update")  # it is found before the next one


def test_buffers_of_a_criterion_without_parameters_are_shared(mpi):
    criterion = torch.nn.CrossEntropyLoss(weight=torch.full((3,), 1.0 + mpi.rank()))
    train(network(0), data(), criterion=criterion)
    assert criterion.weight.tolist() == [1.0] * 3


@pytest.mark.mpi(min_size=2)
def test_a_layer_that_is_frozen_unfrozen_or_replaced_is_followed(mpi):
    """Each changes the set of trained parameters, and none is a registration that torch reports."""
    net, iterator = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)), data()

    def change(state):
        if state.t == 1:
            net[0].requires_grad_(False)
        elif state.t == 2:
            torch.manual_seed(mpi.rank())
            net[0] = torch.nn.Linear(6, 6)
            state.optimizer.param_groups[0]["params"] = list(net.parameters())

    train(net, iterator, engine=AllReduceSGDEngine(debug=True), maxepoch=2, on_sample=change)
    mpi.nn.check_with_allreduce(net)
