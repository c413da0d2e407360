"""The ways to train that ``step`` compares: the same network, data and optimizer, with gradients averaged differently.

Each way is a *trainer*: a function that takes some steps of an ongoing training and calls ``done`` after each one. What
happens between two calls is one whole step, from taking the sample to the new parameters, also where the loop is the
engine's. On a GPU the step is then queued; whoever measures waits for it in ``done``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchmpi_py import nn as mpinn
from torchmpi_py.engine import AllReduceSGDEngine

NONE, DDP = "no communication", "DDP on gloo"
DDP_TORCHMPI, DDP_HOOK = "DDP on torchmpi", "DDP on torchmpi, hook"
SEED, LEARNING_RATE = 1111, 0.01

Sample = tuple[torch.Tensor, torch.Tensor]
Done = Callable[[], None]
Train = Callable[[Sequence[Sample], Done], None]
Way = Callable[[torch.nn.Module], Train]
_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Trainer:
    """``train(samples, done)`` takes one step per sample. Collective, but for NONE."""

    name: str
    network: torch.nn.Module
    train: Train


def trainers(
    layers: Sequence[int], *, with_ddp: bool, torchmpi: Any = None, device: torch.device = _CPU
) -> list[Trainer]:
    """All of them, each with a network of its own from the same seed, on ``device``.

    ``with_ddp``: DDP on torch's default process group. ``torchmpi``: DDP also on this one, of our backend.
    """
    on_torchmpi = functools.partial(_ddp, group=torchmpi)
    hooked = functools.partial(on_torchmpi, with_hook=True)
    ways: list[tuple[str, Way]] = [
        (NONE, _alone),
        *([(DDP, _ddp)] if with_ddp else []),
        *([] if torchmpi is None else [(DDP_TORCHMPI, on_torchmpi), (DDP_HOOK, hooked)]),
        ("synchronize_gradients", _synchronized),
        ("register_async_backward", _async_backward),
        ("engine", lambda network: _engine(network, asynchronous=False)),
        ("engine, asynchronous", lambda network: _engine(network, asynchronous=True)),
    ]
    made = [(name, make_network(layers).to(device), way) for name, way in ways]
    return [Trainer(name, network, way(network)) for name, network, way in made]


def make_network(layers: Sequence[int]) -> torch.nn.Module:
    """A multilayer perceptron, the same for each call and on each rank."""
    torch.manual_seed(SEED)
    parts: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(layers):
        parts += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts[:-1])


def make_samples(
    layers: Sequence[int], batch: int, num_steps: int, rank: int, device: torch.device = _CPU
) -> list[Sample]:
    """The batches of ``rank``: inputs (batch, layers[0]) and class indices (batch,), on ``device``."""
    generator = torch.Generator().manual_seed(SEED + rank)
    return [
        (
            torch.randn(batch, layers[0], generator=generator).to(device),
            torch.randint(layers[-1], (batch,), generator=generator).to(device),
        )
        for _ in range(num_steps)
    ]


def _loop(
    network: torch.nn.Module, forward: Callable[[torch.Tensor], Any], after_backward: Callable[[], None]
) -> Train:
    """A hand-written loop."""
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)

    def train(samples: Sequence[Sample], done: Done) -> None:
        for x, y in samples:
            optimizer.zero_grad()
            criterion(forward(x), y).backward()
            after_backward()
            optimizer.step()
            done()

    return train


def _alone(network: torch.nn.Module) -> Train:
    return _loop(network, network, _nothing)


def _ddp(network: torch.nn.Module, group: Any = None, *, with_hook: bool = False) -> Train:
    """On torch's default process group, or on ``group``; ours has a hook that reduces in symmetric memory."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel(network, process_group=group)
    if with_hook:
        from torchmpi_py import torch_backend

        ddp.register_comm_hook(group, torch_backend.average)
    return _loop(network, ddp, _nothing)


def _synchronized(network: torch.nn.Module) -> Train:
    return _loop(network, network, lambda: mpinn.synchronize_gradients(network))


def _async_backward(network: torch.nn.Module) -> Train:
    return _loop(network, network, mpinn.register_async_backward(network).synchronize)


def _engine(network: torch.nn.Module, *, asynchronous: bool) -> Train:
    """The package's loop; a step ends with its last hook."""
    on_gpu = next(network.parameters()).is_cuda
    engine = AllReduceSGDEngine(usegpu=on_gpu, asynchronous=asynchronous)

    def train(samples: Sequence[Sample], done: Done) -> None:
        engine.hooks.on_update = lambda state: done()
        engine.train(network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=samples, lr=LEARNING_RATE)

    return train


def _nothing() -> None:
    """Nothing to do after the backward pass."""
