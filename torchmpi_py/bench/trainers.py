"""The trainers of the command ``step``: ways to train one network on all ranks.

Each is a function that takes one step per sample of an ongoing training and calls ``done`` after each one. Those of one
kind of ``WAYS`` stand together; "average" and "sharded" all give the same parameters, up to rounding.

There are two networks: a perceptron, whose few large gradients cost bandwidth, and a convolutional network with many
small ones, which cost calls.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.engine import AllReduceSGDEngine

NONE, DDP = "no communication", "DDP on gloo"
DDP_TORCHMPI, DDP_HOOK = "DDP on torchmpi", "DDP on torchmpi, hook"
DDP_VIEWS, DDP_TORCHMPI_VIEWS = (f"{name}, views" for name in (DDP, DDP_TORCHMPI))
DDP_ALONE = "DDP without communication"
FSDP, FSDP_TORCHMPI = "FSDP2 on gloo", "FSDP2 on torchmpi"
WAYS = ("average", "sharded", "compressed")
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.001}),
}
SEED = 1111

Sample = tuple[torch.Tensor, torch.Tensor]
Done = Callable[[], None]
Train = Callable[[Sequence[Sample], Done], None]
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeTrain = Callable[[torch.nn.Module], Train]
_CPU = torch.device("cpu")
_NUM_CONVOLUTIONS, _CHANNELS = 30, 16


@dataclasses.dataclass(frozen=True)
class Trainer:
    """``train(samples, done)`` takes one step per sample. Collective, but for NONE.

    is_exact: whether its parameters are those of plain averaging, up to rounding.
    """

    name: str
    network: torch.nn.Module
    train: Train
    is_exact: bool = True


def trainers(
    layers: Sequence[int],
    *,
    with_ddp: bool,
    torchmpi: Any = None,
    device: torch.device = _CPU,
    ways: Sequence[str] = WAYS[:1],
    optimizer: str = "sgd",
    network: str = "perceptron",
) -> list[Trainer]:
    """NONE, DDP and all trainers of ``ways``, each with a network of its own from the same seed, on ``device``.

    ``with_ddp``: DDP and FSDP2 on torch's default process group. ``torchmpi``: a group of this package's backend, for
    these too. ``network``: one of NETWORKS.
    """
    optimizer_class, options = OPTIMIZERS[optimizer]
    plain = functools.partial(optimizer_class, **options)
    makers: list[tuple[str, MakeTrain, bool]] = [(NONE, lambda network: _loop(network, network, plain), True)]
    if with_ddp:
        makers.append((DDP, functools.partial(_ddp, plain=plain), True))
    if "average" in ways:
        makers += [(name, make, name != DDP_ALONE) for name, make in _averaging(plain, with_ddp, torchmpi)]
    if "sharded" in ways:
        makers += [(name, make, True) for name, make in _sharded(optimizer_class, options, with_ddp, torchmpi)]
    if "compressed" in ways:
        makers += [(name, make, False) for name, make in _compressed(plain, with_ddp)]
    networks = [NETWORKS[network](layers).to(device) for _ in makers]
    return [
        Trainer(name, made, make(made), is_exact) for (name, make, is_exact), made in zip(makers, networks, strict=True)
    ]


def make_perceptron(layers: Sequence[int]) -> torch.nn.Sequential:
    """A multilayer perceptron, the same for each call and on each rank; ``layers``: its widths."""
    torch.manual_seed(SEED)
    parts: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(layers):
        parts += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts[:-1])


def make_convolutional(layers: Sequence[int]) -> torch.nn.Sequential:
    """Convolutions of 3 x 3 between 16 channels, of square images: 60 small parameters, and a classifier.

    The same for each call and on each rank; ``layers``: pixels of an image, and classes.
    """
    torch.manual_seed(SEED)
    side = math.isqrt(layers[0])
    parts: list[torch.nn.Module] = [torch.nn.Unflatten(1, (1, side, side))]
    for number in range(_NUM_CONVOLUTIONS):
        parts += [torch.nn.Conv2d(_CHANNELS if number else 1, _CHANNELS, 3, padding=1), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts, torch.nn.Flatten(), torch.nn.Linear(_CHANNELS * layers[0], layers[-1]))


NETWORKS = {"perceptron": make_perceptron, "convolutional": make_convolutional}
LAYERS = {"perceptron": [784, 4096, 4096, 10], "convolutional": [64, 10]}
"""What ``layers`` is unless given."""


def _averaging(plain: MakeOptimizer, with_ddp: bool, torchmpi: Any) -> list[tuple[str, MakeTrain]]:
    """Ways to average the gradients; and DDP_ALONE, which does all that DDP does but for that."""
    made: list[tuple[str, MakeTrain]] = []
    if with_ddp:
        made = [
            (DDP_ALONE, functools.partial(_ddp, plain=plain, hook=(None, lambda _, bucket: _done(bucket.buffer())))),
            (DDP_VIEWS, functools.partial(_ddp, plain=plain, gradient_as_bucket_view=True)),
        ]
    if torchmpi is not None:
        from torchmpi_py.torch_backend import average  # here, for a torch may be built without torch.distributed

        on_torchmpi = functools.partial(_ddp, plain=plain, group=torchmpi)
        made += [
            (DDP_TORCHMPI, on_torchmpi),
            (DDP_HOOK, functools.partial(on_torchmpi, hook=(torchmpi, average))),
            (DDP_TORCHMPI_VIEWS, functools.partial(on_torchmpi, gradient_as_bucket_view=True)),
        ]
    return [
        *made,
        (
            "synchronize_gradients",
            lambda network: _loop(network, network, plain, lambda: mpinn.synchronize_gradients(network)),
        ),
        (
            "register_async_backward",
            lambda network: _loop(network, network, plain, mpinn.register_async_backward(network).synchronize),
        ),
        ("engine", lambda network: _engine(network, plain)),
        ("engine, asynchronous", lambda network: _engine(network, plain, asynchronous=True)),
    ]


def _sharded(
    optimizer_class: Any, options: dict[str, Any], with_ddp: bool, torchmpi: Any
) -> list[tuple[str, MakeTrain]]:
    """ShardedOptimizer, beside plain averaging by DistributedOptimizer, and torch's ways to divide the state."""
    plain = functools.partial(optimizer_class, **options)

    def zero(parameters: Iterable[Any], group: Any = None) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            parameters, optimizer_class, process_group=group, parameters_as_bucket_view=True, **options
        )

    def sharded(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return optim.ShardedOptimizer(parameters, optimizer_class, **options)

    made: list[tuple[str, MakeTrain]] = []
    if with_ddp:
        made = [
            (f"{DDP}, ZeroRedundancyOptimizer", functools.partial(_ddp, plain=zero)),
            (FSDP, functools.partial(_fsdp, plain=plain, group=None)),
        ]
    if torchmpi is not None:
        on_torchmpi = functools.partial(zero, group=torchmpi)
        made += [
            (f"{DDP_TORCHMPI}, ZeroRedundancyOptimizer", functools.partial(_ddp, plain=on_torchmpi, group=torchmpi)),
            (FSDP_TORCHMPI, functools.partial(_fsdp, plain=plain, group=torchmpi)),
        ]
    return [
        *made,
        ("DistributedOptimizer", lambda network: _distributed(network, plain)),
        ("ShardedOptimizer", lambda network: _loop(network, network, sharded)),
        ("engine, sharded", lambda network: _engine(network, plain, sharded=True)),
    ]


def _compressed(plain: MakeOptimizer, with_ddp: bool) -> list[tuple[str, MakeTrain]]:
    """DistributedOptimizer with each compression, beside DDP with torch's hook.

    Not torch's powerSGD_hook: with several buckets gloo matches its callbacks in another order, and aborts.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    compressions = {
        "None": None,
        "BF16()": optim.compression.BF16(),
        "FP16()": optim.compression.FP16(),
        "TopK(0.01)": optim.compression.TopK(0.01),
        "PowerSGD(2)": optim.compression.PowerSGD(2),
    }
    made: list[tuple[str, MakeTrain]] = []
    if with_ddp:
        made = [(f"{DDP}, fp16_compress_hook", functools.partial(_ddp, plain=plain, hook=(None, fp16_compress_hook)))]
    for name, compression in compressions.items():
        made.append((f"compression={name}", functools.partial(_distributed, plain=plain, compression=compression)))
    return made


def _loop(
    network: torch.nn.Module,
    forward: Callable[[torch.Tensor], Any],
    make_optimizer: MakeOptimizer,
    after_backward: Callable[[], object] = lambda: None,
) -> Train:
    """A hand-written loop."""
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = make_optimizer(network.parameters())

    def train(samples: Sequence[Sample], done: Done) -> None:
        for x, y in samples:
            optimizer.zero_grad()
            criterion(forward(x), y).backward()
            after_backward()
            optimizer.step()
            done()

    return train


def _ddp(
    network: torch.nn.Module,
    plain: MakeOptimizer,
    group: Any = None,
    hook: tuple[Any, Any] | None = None,
    gradient_as_bucket_view: bool = False,
) -> Train:
    """DDP on the default process group or on ``group``; ``hook``: (state, hook) for its communication."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel(
        network, process_group=group, gradient_as_bucket_view=gradient_as_bucket_view
    )
    if hook is not None:
        ddp.register_comm_hook(*hook)
    return _loop(network, ddp, plain)


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


def _fsdp(network: Any, plain: MakeOptimizer, group: Any) -> Train:
    """FSDP2 on the default process group or on ``group``: each layer with parameters in a unit of its own."""
    from torch.distributed import fsdp, group as groups
    from torch.distributed.device_mesh import DeviceMesh

    used: Any = groups.WORLD if group is None else group
    mesh = DeviceMesh.from_group(used, next(network.parameters()).device.type)
    for layer in [layer for layer in network if next(layer.parameters(), None) is not None]:
        fsdp.fully_shard(layer, mesh=mesh)
    return _loop(network, fsdp.fully_shard(network, mesh=mesh), plain)


def _distributed(network: torch.nn.Module, plain: MakeOptimizer, compression: Any = None) -> Train:
    return _loop(
        network,
        network,
        lambda parameters: optim.DistributedOptimizer(plain(parameters), network, compression=compression),
    )


def _engine(network: torch.nn.Module, plain: MakeOptimizer, **options: Any) -> Train:
    """The engine's loop; a step ends with the last hook."""
    on_gpu = next(network.parameters()).is_cuda
    engine = AllReduceSGDEngine(usegpu=on_gpu, **options)
    optimizer = plain(network.parameters())

    def train(samples: Sequence[Sample], done: Done) -> None:
        engine.hooks.on_update = lambda state: done()
        criterion = torch.nn.CrossEntropyLoss()
        engine.train(network=network, criterion=criterion, iterator=samples, optimizer=optimizer, epoch_lines=False)

    return train
