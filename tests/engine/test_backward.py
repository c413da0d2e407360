"""The two halves of the backward pass, and what reaches the parameters. No MPI."""

import pytest
import torch
from runs import loss_of, train
from support import networks

from torchmpi_py.engine import SGDEngine


def linear(seed=0):
    return networks.perceptron(3, 2, seed=seed)[0]


def pairs(num_batches=2):
    return [(networks.batch(4, 3, step=step), torch.tensor([0, 1, 1, 0])) for step in range(num_batches)]


def trained(network, iterator, criterion=loss_of, **options):
    return train(network, iterator, engine=SGDEngine(), criterion=criterion, **options)


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


def test_the_criterion_goes_back_before_the_network_does():
    network, criterion, between = TwoHeads(), Mixed(), []

    def check(state):
        between.append((network.left.weight.grad, criterion.mix.grad, state.output["scores"][0].grad.clone()))

    (sample,) = pairs(1)
    trained(network, [sample], criterion, lr=0, on_backward_criterion=check)
    ((left, mix, score),) = between
    both = torch.nn.ModuleList([network, criterion])
    found = networks.flat_gradients(both).clone()
    both.zero_grad()
    output = network(sample[0])
    output["scores"][0].retain_grad()
    criterion(output, sample[1]).backward()
    assert left is mix is None
    assert torch.equal(score, output["scores"][0].grad)
    torch.testing.assert_close(found, networks.flat_gradients(both), rtol=1e-6, atol=0)
    trained(network, pairs(), criterion, lr=0.5)
    assert criterion.mix.item() != pytest.approx(0.3)


def test_a_penalty_on_parameters_in_the_loss_counts():
    network, times = linear(), []
    (sample,) = pairs(1)

    def criterion(output, target):
        return loss_of(output, target) + network.weight.square().sum()

    hook = network.weight.register_post_accumulate_grad_hook(times.append)
    trained(network, [sample], criterion, lr=0)
    hook.remove()
    assert len(times) == 1  # complete at once: what is sent away by such a hook is the whole gradient
    grad = network.weight.grad.clone()
    network.zero_grad()
    criterion(network(sample[0]), sample[1]).backward()
    torch.testing.assert_close(grad, network.weight.grad)


def test_parameters_that_only_the_optimizer_knows_are_trained():
    network, extra = linear(), torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*network.parameters(), extra], lr=0.1)
    trained(network, pairs(), lambda output, target: loss_of(output * extra, target), optimizer=optimizer)
    assert extra.item() != 1
    assert extra.grad is not None


def test_a_network_that_is_all_frozen_runs_through():
    network, losses = linear().requires_grad_(False), []
    trained(network, pairs(), lr=0, on_update=lambda state: losses.append(state.loss.item()))
    assert len(losses) == 2
    assert network.weight.grad is None


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
        beside = (others(sample[0]).square().sum() * network.bias.sum()).tanh()
        return loss_of(Remembering.apply(output), target) + beside

    trained(network, [sample], criterion, lr=0)
    found = networks.flat_gradients(network).clone()
    assert [parameter.grad for parameter in others.parameters()] == [None, None]
    network.zero_grad()
    criterion(network(sample[0]), sample[1]).backward()
    torch.testing.assert_close(found, networks.flat_gradients(network))


LOSSES = {
    "does not require grad": lambda output: output.detach().sum(),
    "only for scalar outputs": lambda output: output.sum(1),
    "scalar outputs": lambda output: torch.ones(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("message", LOSSES)
def test_what_is_no_loss_is_an_error(message):
    with pytest.raises((RuntimeError, TypeError), match=message):
        trained(linear(), pairs(), lambda output, _: LOSSES[message](output))


def test_what_only_a_hook_gave_a_gradient_is_forgotten_too():
    network, kept = torch.nn.ModuleDict({"trained": linear(), "beside": linear(2)}), []

    def check(state):
        kept.append(network["beside"].weight.grad)
        network["beside"].weight.grad = torch.ones_like(network["beside"].weight)

    network.forward = network["trained"].forward
    optimizer = torch.optim.SGD(network["trained"].parameters(), lr=0.1)
    trained(network, pairs(), optimizer=optimizer, on_backward_criterion=check)
    assert kept == [None, None]
