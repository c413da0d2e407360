"""The two halves of the backward pass, and what reaches the parameters. No MPI."""

import pytest
import torch

from torchmpi_py.engine import SGDEngine


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def pairs(num_batches=2):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator))
        for _ in range(num_batches)
    ]


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
        return torch.nn.functional.cross_entropy(self.mix * left + (1 - self.mix) * right, target)


def test_the_criterion_goes_back_before_the_network_does():
    network, criterion = TwoHeads(), Mixed()
    engine = SGDEngine()
    between = []

    def check(state):
        between.append((network.left.weight.grad, criterion.mix.grad, state.output["scores"][0].grad.clone()))

    engine.hooks.on_backward_criterion = check
    (sample,) = pairs(1)
    engine.train(network=network, criterion=criterion, iterator=[sample], lr=0)
    ((left, mix, score),) = between
    both = torch.nn.ModuleList([network, criterion])
    found = {name: parameter.grad.clone() for name, parameter in both.named_parameters()}
    both.zero_grad()
    output = network(sample[0])
    output["scores"][0].retain_grad()
    criterion(output, sample[1]).backward()
    assert left is None
    assert mix is None
    assert torch.equal(score, output["scores"][0].grad)
    for name, parameter in both.named_parameters():
        assert torch.allclose(parameter.grad, found[name], rtol=1e-6, atol=0), name


def test_the_criterion_is_trained_too():
    criterion = Mixed()
    SGDEngine().train(network=TwoHeads(), criterion=criterion, iterator=pairs(), lr=0.5)
    assert criterion.mix.item() != pytest.approx(0.3)


def test_a_penalty_on_parameters_in_the_loss_counts():
    network = linear()
    (sample,) = pairs(1)

    def criterion(output, target):
        return torch.nn.functional.cross_entropy(output, target) + network.weight.square().sum()

    times = []
    hook = network.weight.register_post_accumulate_grad_hook(times.append)
    SGDEngine().train(network=network, criterion=criterion, iterator=[sample], lr=0)
    hook.remove()
    assert len(times) == 1  # complete at once: what is sent away by such a hook is the whole gradient
    grad = network.weight.grad.clone()
    network.zero_grad()
    criterion(network(sample[0]), sample[1]).backward()
    assert torch.allclose(grad, network.weight.grad)


def test_parameters_that_only_the_optimizer_knows_are_trained():
    network, extra = linear(), torch.nn.Parameter(torch.ones(()))
    SGDEngine().train(
        network=network,
        criterion=lambda output, target: torch.nn.functional.cross_entropy(output * extra, target),
        iterator=pairs(),
        optimizer=torch.optim.SGD([*network.parameters(), extra], lr=0.1),
    )
    assert extra.item() != 1
    assert extra.grad is not None


def test_a_network_that_is_all_frozen_runs_through():
    network = linear().requires_grad_(False)
    engine = SGDEngine()
    losses = []
    engine.hooks.on_update = lambda state: losses.append(state.loss.item())
    engine.train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), lr=0)
    assert len(losses) == 2
    assert network.weight.grad is None


class Weighted(list):
    weight, num_samples = 0.25, 0


def test_the_weight_scales_gradients_and_not_the_loss():
    network = linear()
    (sample,) = pairs(1)
    state = SGDEngine().train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=Weighted([sample]), lr=0)
    grad = network.weight.grad.clone()
    network.zero_grad()
    loss = torch.nn.functional.cross_entropy(network(sample[0]), sample[1])
    loss.backward()
    assert torch.equal(state.loss, loss)
    assert state.num_samples == 0
    assert torch.equal(grad, 0.25 * network.weight.grad)


class Remembering(torch.autograd.Function):
    """A function whose node has attributes with the names of torch's own."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable, ctx.name = x.detach(), "a function"
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def test_only_what_is_trained_gets_a_gradient():
    network, others = linear(), linear(2)
    (sample,) = pairs(1)

    def criterion(output, target):
        loss = torch.nn.functional.cross_entropy(Remembering.apply(output), target)
        return loss + (others(sample[0]).square().sum() * network.bias.sum()).tanh()

    SGDEngine().train(network=network, criterion=criterion, iterator=[sample], lr=0)
    found = [parameter.grad.clone() for parameter in network.parameters()]
    assert [parameter.grad for parameter in others.parameters()] == [None, None]
    network.zero_grad()
    criterion(network(sample[0]), sample[1]).backward()
    for parameter, grad in zip(network.parameters(), found, strict=True):
        assert torch.allclose(parameter.grad, grad)


LOSSES = {
    "does not require grad": lambda output: output.detach().sum(),
    "only for scalar outputs": lambda output: output.sum(1),
    "scalar outputs": lambda output: torch.ones(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("message", LOSSES)
def test_what_is_no_loss_is_an_error(message):
    train = SGDEngine().train
    with pytest.raises((RuntimeError, TypeError), match=message):
        train(network=linear(), criterion=lambda output, _: LOSSES[message](output), iterator=pairs(), lr=0.1)


def test_what_only_a_hook_gave_a_gradient_is_forgotten_too():
    network = torch.nn.ModuleDict({"trained": linear(), "beside": linear(2)})
    engine, kept = SGDEngine(), []

    def check(state):
        kept.append(network["beside"].weight.grad)
        network["beside"].weight.grad = torch.ones_like(network["beside"].weight)

    engine.hooks.on_backward_criterion = check
    network.forward = network["trained"].forward
    optimizer = torch.optim.SGD(network["trained"].parameters(), lr=0.1)
    engine.train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=pairs(), optimizer=optimizer)
    assert kept == [None, None]
