"""A regression in float64 on which any number of ranks must take the steps that one process takes.

The whole batch of a step is the same wherever it is asked for; a rank of a group uses every size-th row of it.
"""

import torch

ROWS = 60  # of a batch: divisible by 1 to 5
STEPS = 4
device = "cpu"  # of networks and batches; tests/gpu assigns it


def network(width=11):
    """On every rank the same. No number of ranks divides the sizes of its layers, unless one is asked for."""
    torch.manual_seed(7)
    first, second = torch.nn.Linear(6, width), torch.nn.Linear(width, 7)
    layers = first, torch.nn.Tanh(), second, torch.nn.Tanh(), torch.nn.Linear(7, 3)
    return torch.nn.Sequential(*layers).double().to(device)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return inputs.to(device), targets.to(device)


def loss(model, step, rank=0, size=1):
    inputs, targets = batch(step)
    return torch.nn.functional.mse_loss(model(inputs[rank::size]), targets[rank::size])


def train(model, optimizer, rank=0, size=1, steps=range(STEPS), max_norm=None):
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank, size).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def trained_alone(width=11, optimizer=adam, **how):
    """The parameters by name, after the same steps in this process alone."""
    model = network(width)
    train(model, optimizer(model.parameters()), **how)
    return model.state_dict()


def assert_equal(parameters, expected):
    """By name; a distributed tensor is gathered first."""
    assert list(parameters) == list(expected)
    for name, value in parameters.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(whole, expected[name], rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


def rows():
    """The batches of all steps, one after another, as a dataset."""
    batches = [batch(step) for step in range(STEPS)]
    return torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def loader(rank, size):
    """A rank's share of every batch."""
    sampler = torch.utils.data.DistributedSampler(rows(), size, rank, shuffle=False)
    return torch.utils.data.DataLoader(rows(), ROWS // size, sampler=sampler)


def losses_alone():
    """The loss of each step, before the step, after the same training in this process alone."""
    model = network()
    optimizer, losses = adam(model.parameters()), []
    for step in range(STEPS):
        losses.append(loss(model, step).item())
        train(model, optimizer, steps=[step])
    return losses


def report(rank, size, losses):
    """One line with all that a program of others came to: rank 2 of 3: 0.5 0.4."""
    print(f"rank {rank} of {size}:", *losses, flush=True)
