"""The loop alone: hooks, state, optimizers, modes, samples, losses. No MPI."""

import dataclasses

import pytest
import torch
from runs import loss_of, train
from support import networks
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from torchmpi_py.engine import Hooks, SGDEngine

PER_SAMPLE = ["on_sample", "on_forward", "on_forward_criterion", "on_backward", "on_update"]


def linear(seed=0):
    return networks.perceptron(3, 2, seed=seed)[0]


def pairs(num_batches=2):
    return [(networks.batch(4, 3, step=step), torch.tensor([0, 1, 1, 0])) for step in range(num_batches)]


def trained(network=None, iterator=None, **options):
    options.setdefault("engine", SGDEngine())
    return train(network or linear(), pairs() if iterator is None else iterator, **options)


def test_hooks_are_called_in_their_order():
    engine, calls = SGDEngine(), []
    for moment in [field.name for field in dataclasses.fields(Hooks)]:
        setattr(engine.hooks, moment, lambda state, moment=moment: calls.append(moment))
    engine.train(network=linear(), criterion=loss_of, iterator=pairs(), lr=0.1, maxepoch=2)
    epoch = ["on_start_epoch", *PER_SAMPLE, *PER_SAMPLE, "on_end_epoch"]
    assert calls == ["on_start", *epoch, *epoch, "on_end"]
    calls.clear()
    engine.test(network=linear(), criterion=loss_of, iterator=pairs())
    assert calls == ["on_start", *PER_SAMPLE[:3], *PER_SAMPLE[:3], "on_end"]


def test_a_misspelt_hook_raises():
    with pytest.raises(AttributeError, match="on_forwards"):
        SGDEngine().hooks.on_forwards = print
    with pytest.raises(TypeError, match="onSample"):
        Hooks(onSample=print)


def test_a_hook_that_a_hook_sets_is_called():
    engine, calls = SGDEngine(), []
    engine.hooks.on_sample = lambda state: setattr(engine.hooks, "on_update", calls.append)
    trained(engine=engine)
    assert len(calls) == 2
    calls.clear()
    assert engine.calls is engine.hooks


def test_training_is_plain_sgd():
    network, expected = linear(), linear()
    trained(network, maxepoch=3)
    for _ in range(3):
        for x, target in pairs():
            expected.zero_grad()
            loss_of(expected(x), target).backward()
            networks.fill(expected, networks.flat(expected) - 0.1 * networks.flat_gradients(expected))
    torch.testing.assert_close(networks.flat(network), networks.flat(expected))


class Own(torch.nn.Linear):
    """A layer with a parameter that it does not show, and something of its own to forget before a step."""

    num_calls = 0

    def parameters(self, recurse=True):
        yield self.weight

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.num_calls += 1


def test_a_network_shows_its_parameters_and_forgets_gradients_itself():
    network = Own(3, 2)
    bias = network.bias.detach().clone()
    trained(network)
    assert network.num_calls == 2
    assert torch.equal(network.bias, bias)


def test_the_state_counts():
    seen = []
    state = trained(
        maxepoch=2, on_update=lambda state: seen.append((state.epoch, state.t, state.num_samples, state.place.weight))
    )
    assert seen == [(0, 1, 4, 1.0), (0, 2, 4, 1.0), (1, 3, 4, 1.0), (1, 4, 4, 1.0)]
    assert (state.epoch, state.t, state.training) == (2, 4, True)


def test_a_hook_resumes_and_stops():
    epochs = []
    trained(
        maxepoch=100,
        on_start=lambda state: setattr(state, "epoch", 5),
        on_start_epoch=lambda state: epochs.append(state.epoch),
        on_end_epoch=lambda state: setattr(state, "maxepoch", min(state.maxepoch, 7)),
    )
    assert epochs == [5, 6]


def test_lr_zero_computes_gradients_and_updates_nothing():
    network = linear()
    assert trained(network, lr=0).optimizer is None
    assert torch.equal(network.weight, linear().weight)
    assert network.weight.grad.abs().sum() > 0


def test_an_optimizer_is_made_by_a_function_or_taken_as_it_is():
    network = linear()
    assert isinstance(trained(network, optimizer=torch.optim.Adam).optimizer, torch.optim.Adam)
    assert not torch.equal(network.weight, linear().weight)
    network = linear()
    optimizer = torch.optim.SGD([network.bias], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step
    assert trained(network, optimizer=optimizer, on_end_epoch=lambda state: schedule.step()).optimizer is optimizer
    assert torch.equal(network.weight, linear().weight)
    assert not torch.equal(network.bias, linear().bias)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, ValueError, "optimizer"),
        ({"lr": 0.1, "optimizer": torch.optim.Adam}, ValueError, "optimizer"),
        ({"optimizer": 3}, TypeError, "optimizer"),
        ({"optimizer": lambda parameters: None}, TypeError, "function that returns one"),
        ({"optimizer": torch.optim.LBFGS}, TypeError, "closure"),
        ({"optimizer": torch.optim.LBFGS(linear().parameters())}, TypeError, "closure"),
    ],
)
def test_optimizers_that_are_refused(given, error, said):
    with pytest.raises(error, match=said):
        SGDEngine().train(network=linear(), criterion=loss_of, iterator=pairs(), **given)


@pytest.mark.parametrize("once", [lambda pairs: (pair for pair in pairs), iter, lambda pairs: map(tuple, pairs)])
def test_what_can_be_run_through_once_is_refused_for_two_epochs(once):
    iterator = once(pairs())
    with pytest.raises(TypeError, match="only once, and maxepoch=2"):
        trained(iterator=iterator, maxepoch=2)
    assert trained(iterator=iterator).t == 2


@pytest.mark.parametrize("sample", [torch.zeros(4, 3), {"input": 1, "target": 2}, (1,), "ab", 7])
def test_a_sample_that_is_no_pair_is_refused(sample):
    with pytest.raises(TypeError, match=r"\(input, target\)"):
        SGDEngine().test(network=linear(), criterion=loss_of, iterator=[sample])


def test_a_hook_may_replace_the_sample():
    class Forward(SGDEngine):  # the count does not depend on it
        def forward(self, state):
            state.output = state.network(state.sample[0])

    engine, network = Forward(), linear()
    engine.hooks.on_sample = lambda state: setattr(state, "sample", (state.sample["x"], state.sample["y"]))
    ((x, y),) = pairs(1)
    state = engine.test(network=network, criterion=loss_of, iterator=[{"x": x, "y": y}])
    assert state.loss == loss_of(network(x), y)
    assert state.num_samples == len(y) > 1


def test_testing_restores_modes_and_takes_no_gradients():
    network = torch.nn.Sequential(linear(), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2))
    network[2].eval()
    engine, modes = SGDEngine(), []
    engine.hooks.on_forward = lambda state: modes.append((network.training, state.output.requires_grad))
    engine.test(network=network, criterion=loss_of, iterator=pairs(1))
    assert modes == [(False, False)]
    assert [module.training for module in network] == [True, True, False]
    with pytest.raises(TypeError):
        engine.test(network=network, criterion=loss_of, iterator=[1])
    assert network.training
    assert torch.is_grad_enabled()


def test_a_dataloader_is_an_iterator_and_its_sampler_is_told_the_epoch():
    class Sampler(SequentialSampler):
        told = []

        def set_epoch(self, epoch):
            self.told.append(epoch)

    dataset, lengths = TensorDataset(torch.randn(10, 3), torch.arange(10) % 2), []
    loader = DataLoader(dataset, batch_size=4, sampler=Sampler(dataset))
    trained(iterator=loader, maxepoch=2, on_sample=lambda state: lengths.append(state.num_samples))
    assert lengths == [4, 4, 2] * 2
    assert Sampler.told == [0, 1]


class TwoHeads(torch.nn.Module):
    """Outputs in a nested structure, one of them without gradient."""

    def __init__(self):
        super().__init__()
        self.left, self.right = linear(1), linear(2)

    def forward(self, x):
        left = self.left(x)
        return {"scores": (left, self.right(x)), "chosen": left.argmax(1), "unused": [left * 2]}


class Mixed(torch.nn.Module):
    """A criterion that has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, output, target):
        left, right = output["scores"]
        return loss_of(self.mix * left + (1 - self.mix) * right, target)


def test_a_criterion_with_a_parameter_and_outputs_in_a_structure():
    network, criterion = TwoHeads(), Mixed()
    (sample,) = pairs(1)
    trained(network, [sample], criterion=criterion, lr=0)
    both = torch.nn.ModuleList([network, criterion])
    found = networks.flat_gradients(both).clone()
    both.zero_grad()
    criterion(network(sample[0]), sample[1]).backward()
    torch.testing.assert_close(found, networks.flat_gradients(both), rtol=1e-6, atol=0)
    trained(network, pairs(), criterion=criterion, lr=0.5)
    assert criterion.mix.item() != pytest.approx(0.3)


class Penalized(torch.nn.Linear):
    """A layer that computes an auxiliary loss beside its output."""

    def forward(self, x):
        self.penalty = self.weight.square().sum()
        return super().forward(x)


@pytest.mark.parametrize("kind", ["auxiliary", "in place"])
def test_losses_that_plain_autograd_takes(kind):
    network, (sample,) = Penalized(3, 2), pairs(1)

    def criterion(output, target):
        if kind == "auxiliary":
            return loss_of(output, target) + network.penalty
        return loss_of(output.mul_(2.0), target)

    trained(network, [sample], criterion=criterion, lr=0)
    found = networks.flat_gradients(network).clone()
    network.zero_grad()
    criterion(network(sample[0]), sample[1]).backward()
    assert torch.equal(found, networks.flat_gradients(network))


class Weighted(list):
    weight, num_samples = 0.25, 0


def test_the_weight_scales_gradients_and_not_the_loss():
    network, (sample,) = linear(), pairs(1)
    state = trained(network, Weighted([sample]), lr=0)
    grad = network.weight.grad.clone()
    network.zero_grad()
    loss = loss_of(network(sample[0]), sample[1])
    loss.backward()
    assert torch.equal(state.loss, loss)
    assert state.num_samples == 0
    assert torch.equal(grad, 0.25 * network.weight.grad)


LOSSES = {
    "does not require grad": lambda output: output.detach().sum(),
    "only for scalar outputs": lambda output: output.sum(1),
}


@pytest.mark.parametrize("message", LOSSES)
def test_what_is_no_loss_is_an_error(message):
    with pytest.raises((RuntimeError, TypeError), match=message):
        trained(criterion=lambda output, _: LOSSES[message](output))
