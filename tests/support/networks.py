"""Small networks and batches that are the same in each call, and what a module holds as one tensor."""

import itertools

import torch


def perceptron(*sizes, norm=None, seed=3, dtype=torch.float32):
    """Return linear layers of these sizes with tanh between them, behind ``norm(width)`` if there is one."""
    torch.manual_seed(seed)
    layers = []
    for number, (num_in, num_out) in enumerate(itertools.pairwise(sizes), 2):
        layers.append(torch.nn.Linear(num_in, num_out))
        if number < len(sizes):
            layers += [norm(num_out), torch.nn.Tanh()] if norm else [torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).to(dtype)


def batch(*shape, rank=0, step=0, dtype=torch.float32):
    """Return random values that differ by rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=dtype)


def flat(module):
    """Return a copy of all parameters as one tensor."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


def flat_gradients(module):
    """Return a copy of all gradients as one tensor; zeros where a parameter has none."""
    return torch.cat(
        [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in module.parameters()]
    )


def fill(module, values):
    """Write one tensor over all parameters."""
    parameters = list(module.parameters())
    with torch.no_grad():
        for p, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))
