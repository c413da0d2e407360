"""The loop alone: order of the hooks, state, optimizers, modes, samples, errors. No MPI."""

import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchmpi_py.engine import Hooks, SGDEngine

MOMENTS = [field.name for field in dataclasses.fields(Hooks)]
PER_SAMPLE = [
    "on_sample",
    "on_forward",
    "on_forward_criterion",
    "on_backward_criterion",
    "on_backward",
    "on_update",
]


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def pairs(num_batches=2, batch_size=4):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(batch_size, 3, generator=generator), torch.randint(2, (batch_size,), generator=generator))
        for _ in range(num_batches)
    ]


def recorded(engine):
    calls = []
    for moment in MOMENTS:
        setattr(engine.hooks, moment, lambda state, moment=moment: calls.append(moment))
    return calls


def test_the_moments():
    assert ["on_start", "on_start_epoch", *PER_SAMPLE, "on_end_epoch", "on_end", "on_recovery"] == MOMENTS


def test_hooks_of_training_are_called_in_their_order():
    engine = SGDEngine()
    calls = recorded(engine)
    engine.train(network=linear(), criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(2), lr=0.1, maxepoch=2)
    epoch = ["on_start_epoch", *PER_SAMPLE, *PER_SAMPLE, "on_end_epoch"]
    assert calls == ["on_start", *epoch, *epoch, "on_end"]


def test_hooks_of_testing_are_called_in_their_order():
    engine = SGDEngine()
    calls = recorded(engine)
    engine.test(network=linear(), criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(2))
    sample = ["on_sample", "on_forward", "on_forward_criterion"]
    assert calls == ["on_start", *sample, *sample, "on_end"]


def test_a_misspelt_hook_raises():
    with pytest.raises(AttributeError, match="on_forwards"):
        SGDEngine().hooks.on_forwards = print
    with pytest.raises(TypeError, match="onSample"):
        Hooks(onSample=print)


def test_training_is_plain_sgd():
    network, expected = linear(), linear()
    SGDEngine().train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), lr=0.1, maxepoch=3)
    for _ in range(3):
        for x, target in pairs():
            expected.zero_grad()
            torch.nn.functional.cross_entropy(expected(x), target).backward()
            with torch.no_grad():
                for parameter in expected.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
    assert torch.equal(network.weight, expected.weight)
    assert torch.equal(network.bias, expected.bias)


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
    SGDEngine().train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(2), lr=0.1)
    assert network.num_calls == 2
    assert torch.equal(network.bias, bias)


def test_the_state_counts():
    engine = SGDEngine()
    seen = []
    engine.hooks.on_update = lambda state: seen.append((state.epoch, state.t, state.num_samples, state.weight))
    state = engine.train(network=linear(), criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(2), lr=0.1, maxepoch=2)
    assert seen == [(0, 1, 4, 1.0), (0, 2, 4, 1.0), (1, 3, 4, 1.0), (1, 4, 4, 1.0)]
    assert (state.epoch, state.t, state.training) == (2, 4, True)


def test_a_hook_resumes_and_stops():
    engine = SGDEngine()
    epochs = []
    engine.hooks.on_start = lambda state: setattr(state, "epoch", 5)
    engine.hooks.on_start_epoch = lambda state: epochs.append(state.epoch)
    engine.hooks.on_end_epoch = lambda state: setattr(state, "maxepoch", min(state.maxepoch, 7))
    engine.train(network=linear(), criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), lr=0.1, maxepoch=100)
    assert epochs == [5, 6]


def test_lr_zero_computes_gradients_and_updates_nothing():
    network = linear()
    state = SGDEngine().train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), lr=0)
    assert state.optimizer is None
    assert torch.equal(network.weight, linear().weight)
    assert network.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda parameters: torch.optim.Adam(parameters, lr=1e-3)])
def test_a_function_makes_the_optimizer(make):
    network = linear()
    state = SGDEngine().train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), optimizer=make)
    assert isinstance(state.optimizer, torch.optim.Adam)
    assert not torch.equal(network.weight, linear().weight)


def test_an_optimizer_is_taken_as_it_is():
    network = linear()
    optimizer = torch.optim.SGD([network.bias], lr=0.1)
    state = SGDEngine().train(
        network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), optimizer=optimizer
    )
    assert state.optimizer is optimizer
    assert torch.equal(network.weight, linear().weight)
    assert not torch.equal(network.bias, linear().bias)


@pytest.mark.parametrize(
    ("given", "error"),
    [({}, ValueError), ({"lr": 0.1, "optimizer": torch.optim.Adam}, ValueError), ({"optimizer": 3}, TypeError)],
)
def test_ambiguous_optimizers_are_refused(given, error):
    with pytest.raises(error, match="optimizer"):
        SGDEngine().train(network=linear(), criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), **given)


@pytest.mark.parametrize("as_function", [False, True])
def test_an_optimizer_that_needs_a_closure_is_refused(as_function):
    network = linear()
    optimizer = torch.optim.LBFGS if as_function else torch.optim.LBFGS(network.parameters())
    with pytest.raises(TypeError, match=r"LBFGS\.step needs a closure"):
        SGDEngine().train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), optimizer=optimizer)


def test_an_optimizer_with_a_schedule_is_taken():
    network = linear()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step
    engine = SGDEngine()
    engine.hooks.on_end_epoch = lambda state: schedule.step()
    engine.train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("once", [lambda pairs: (pair for pair in pairs), iter, lambda pairs: map(tuple, pairs)])
def test_what_can_be_run_through_once_is_refused_for_two_epochs(once):
    options = {"network": linear(), "criterion": torch.nn.CrossEntropyLoss(), "lr": 0.1}
    iterator = once(pairs())
    with pytest.raises(TypeError, match="run through only once, and maxepoch=2"):
        SGDEngine().train(iterator=iterator, maxepoch=2, **options)
    assert SGDEngine().train(iterator=iterator, **options).t == 2


@pytest.mark.parametrize("sample", [torch.zeros(4, 3), {"input": 1, "target": 2}, (1,), "ab", 7])
def test_a_sample_that_is_no_pair_is_refused(sample):
    with pytest.raises(TypeError, match=r"\(input, target\)"):
        SGDEngine().test(network=linear(), criterion=torch.nn.CrossEntropyLoss(), iterator=[sample])


def test_a_hook_may_replace_the_sample():
    engine = SGDEngine()
    engine.hooks.on_sample = lambda state: setattr(state, "sample", (state.sample["x"], state.sample["y"]))
    ((x, y),) = pairs(1)
    network = linear()
    state = engine.test(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=[{"x": x, "y": y}])
    assert state.loss == torch.nn.functional.cross_entropy(network(x), y)
    assert state.num_samples == len(y) > 1


def test_testing_restores_modes_and_takes_no_gradients():
    network = torch.nn.Sequential(linear(), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2))
    network.train()
    network[2].eval()
    engine = SGDEngine()
    modes = []
    engine.hooks.on_forward = lambda state: modes.append((network.training, state.output.requires_grad))
    engine.test(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(1))
    assert modes == [(False, False)]
    assert [module.training for module in network] == [True, True, False]
    with pytest.raises(TypeError):
        engine.test(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=[None])
    assert network.training
    assert torch.is_grad_enabled()


def test_a_dataloader_is_an_iterator_and_its_sampler_is_told_the_epoch():
    class Sampler(torch.utils.data.SequentialSampler):
        told = []

        def set_epoch(self, epoch):
            self.told.append(epoch)

    dataset = TensorDataset(torch.randn(10, 3), torch.randint(2, (10,)))
    loader = DataLoader(dataset, batch_size=4, sampler=Sampler(dataset))
    engine = SGDEngine()
    lengths = []
    engine.hooks.on_sample = lambda state: lengths.append(state.num_samples)
    engine.train(network=linear(), criterion=torch.nn.CrossEntropyLoss(), iterator=loader, lr=0.1, maxepoch=2)
    assert lengths == [4, 4, 2] * 2
    assert Sampler.told == [0, 1]


def test_subclasses_bracket_the_run_also_when_it_fails():
    from contextlib import contextmanager

    events = []

    class Bracketed(SGDEngine):
        @contextmanager
        def session(self, state):
            events.append("in")
            try:
                yield
            finally:
                events.append("out")

    engine = Bracketed()
    engine.hooks.on_backward_criterion = lambda state: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.train(network=linear(), criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), lr=0.1)
    assert events == ["in", "out"]
