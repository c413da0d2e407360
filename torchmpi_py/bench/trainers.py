"""The trainers of the command ``step``: several methods of training the same network on all ranks.

A trainer is a function that takes one step per sample of an ongoing training, and calls ``done`` after each step.
``WAYS`` lists the groups of trainers. The trainers of "average" (except DDP_ALONE) and of "sharded" produce the same
parameters, up to rounding errors.

There are two networks. The perceptron has a few large gradients, so bandwidth limits the averaging. The small GPT has
small gradients relative to its amount of computation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.engine import AllReduceSGDEngine

NONE, DDP = "no communication", "DDP on gloo"
DDP_TORCHMPI, DDP_HOOK = "DDP on torchmpi", "DDP on torchmpi, hook"
DDP_VIEWS, DDP_TORCHMPI_VIEWS = (f"{name}, views" for name in (DDP, DDP_TORCHMPI))
DDP_ALONE = "DDP without communication"
FSDP, FSDP_TORCHMPI = "FSDP2 on gloo", "FSDP2 on torchmpi"
WAYS = ("average", "sharded", "compressed")
OPTIMIZERS: dict[str, functools.partial[Any]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.001),
}
SEED = 1111

Sample = tuple[torch.Tensor, torch.Tensor]
Done = Callable[[], None]
Train = Callable[[Sequence[Sample], Done], None]
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeTrain = Callable[[torch.nn.Module], Train]
_CPU = torch.device("cpu")
_DEPTH, _WIDTH = 4, 128


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A network with its training function: ``train(samples, done)`` takes one step per sample.

    All ranks must call ``train`` together, except for NONE. ``is_exact`` states whether the trainer produces the same
    parameters as plain averaging, up to rounding errors. It has no meaning for NONE.
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
    """Return NONE, DDP, DistributedOptimizer and all trainers of ``ways``, each with its own network on ``device``.

    ``with_ddp`` includes the trainers on torch's default process group. ``torchmpi`` is a process group of this
    package's backend; if it is passed, DDP and FSDP2 also run on this group. ``network`` is one of NETWORKS.
    """
    plain = OPTIMIZERS[optimizer]
    kinds = [
        _Kind(NONE, functools.partial(_loop, make_optimizer=plain)),
        _Kind(DDP, functools.partial(_ddp, plain=plain), needs=DDP),
        _Kind("DistributedOptimizer", functools.partial(_distributed, plain=plain)),
    ]
    if "average" in ways:
        kinds += _averaging(plain, torchmpi)
    if "sharded" in ways:
        kinds += _sharded(plain, torchmpi)
    if "compressed" in ways:
        kinds += _compressed(plain)
    missing = {DDP} if not with_ddp else set()
    missing |= {DDP_TORCHMPI} if torchmpi is None else set()
    made = []
    for kind in kinds:
        if kind.needs not in missing:
            trained = NETWORKS[network](layers).to(device)
            made.append(Trainer(kind.name, trained, kind.make(trained), kind.is_exact))
    return made


class _Kind(NamedTuple):
    """The name of a trainer, and the function that creates it from a network.

    ``needs`` is DDP if the trainer needs the process group on gloo, DDP_TORCHMPI if it needs the group on torchmpi, or
    "" if it needs no group.
    """

    name: str
    make: MakeTrain
    needs: str = ""
    is_exact: bool = True


def make_perceptron(layers: Sequence[int]) -> torch.nn.Sequential:
    """Return a perceptron with layers of the widths ``layers``.

    The parameters have the same values in each call and on each rank.
    """
    torch.manual_seed(SEED)
    parts: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(layers):
        parts += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts[:-1])


def make_gpt(layers: Sequence[int]) -> torch.nn.Sequential:
    """Return a GPT from torch's layers, as large as the GPT in ``examples/gpt.py``.

    The parameters have the same values in each call and on each rank. ``layers`` is the context length and the number
    of different tokens. The network maps tokens of shape (batch, context) to scores of shape (batch * context, number
    of tokens). Attention has no mask, because ``torch.nn.Sequential`` passes no mask to its layers. The layers have no
    bias, because the gradient of the keys' bias consists only of rounding errors. Adam would turn these errors into
    different steps for different trainers.
    """
    torch.manual_seed(SEED)
    encoder = functools.partial(torch.nn.TransformerEncoderLayer, _WIDTH, _WIDTH // 32, 4 * _WIDTH, dropout=0.0)
    return torch.nn.Sequential(
        torch.nn.Embedding(layers[-1], _WIDTH),
        *[encoder(activation="gelu", batch_first=True, norm_first=True, bias=False) for _ in range(_DEPTH)],
        torch.nn.Flatten(0, 1),
        torch.nn.Linear(_WIDTH, layers[-1], bias=False),
    )


NETWORKS = {"perceptron": make_perceptron, "gpt": make_gpt}
LAYERS = {"perceptron": [784, 4096, 4096, 10], "gpt": [128, 128]}
"""The default ``layers`` of each network."""


def _averaging(plain: MakeOptimizer, torchmpi: Any) -> list[_Kind]:
    """Return trainers that average the gradients, and DDP_ALONE, which is DDP without the averaging."""
    from torchmpi_py.torch_backend import average  # Only this command needs the backend.

    on_gloo = functools.partial(_ddp, plain=plain)
    on_torchmpi = functools.partial(_ddp, plain=plain, group=torchmpi)
    alone = functools.partial(on_gloo, hook=(None, lambda _, bucket: _done(bucket.buffer())))
    return [
        _Kind(DDP_ALONE, alone, DDP, is_exact=False),
        _Kind(DDP_VIEWS, functools.partial(on_gloo, gradient_as_bucket_view=True), DDP),
        _Kind(DDP_TORCHMPI, on_torchmpi, DDP_TORCHMPI),
        _Kind(DDP_HOOK, functools.partial(on_torchmpi, hook=(torchmpi, average)), DDP_TORCHMPI),
        _Kind(DDP_TORCHMPI_VIEWS, functools.partial(on_torchmpi, gradient_as_bucket_view=True), DDP_TORCHMPI),
        _Kind(
            "synchronize_gradients",
            lambda network: _loop(network, plain, after_backward=lambda: mpinn.synchronize_gradients(network)),
        ),
        _Kind(
            "register_async_backward",
            lambda network: _loop(network, plain, after_backward=mpinn.register_async_backward(network).synchronize),
        ),
        _Kind("engine", lambda network: _engine(network, plain)),
        _Kind("engine, asynchronous", lambda network: _engine(network, plain, asynchronous=True)),
    ]


def _sharded(plain: functools.partial[Any], torchmpi: Any) -> list[_Kind]:
    """Return trainers that shard the optimizer: ShardedOptimizer, and torch's ZeroRedundancyOptimizer and FSDP2."""
    optimizer_class: Any = plain.func

    def zero(parameters: Iterable[Any], group: Any = None) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            parameters, optimizer_class, process_group=group, parameters_as_bucket_view=True, **plain.keywords
        )

    def sharded(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return optim.ShardedOptimizer(parameters, optimizer_class, **plain.keywords)

    kinds = []
    for ddp, fsdp, group in ((DDP, FSDP, None), (DDP_TORCHMPI, FSDP_TORCHMPI, torchmpi)):
        of_ddp = functools.partial(_ddp, plain=functools.partial(zero, group=group), group=group)
        kinds.append(_Kind(f"{ddp}, ZeroRedundancyOptimizer", of_ddp, ddp))
        kinds.append(_Kind(fsdp, functools.partial(_fsdp, plain=plain, group=group), ddp))
    return [
        *kinds,
        _Kind("ShardedOptimizer", functools.partial(_loop, make_optimizer=sharded)),
        _Kind("engine, sharded", lambda network: _engine(network, plain, sharded=True)),
    ]


def _compressed(plain: MakeOptimizer) -> list[_Kind]:
    """Return trainers that compress gradients: DistributedOptimizer with each compression, and DDP with a torch hook.

    torch's powerSGD_hook is not included: with several buckets, gloo runs the hook's callbacks in a different order on
    each rank, and aborts.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    compressions = {
        "BF16()": optim.compression.BF16(),
        "FP16()": optim.compression.FP16(),
        "TopK(0.01)": optim.compression.TopK(0.01),
        "PowerSGD(2)": optim.compression.PowerSGD(2),
    }
    hooked = functools.partial(_ddp, plain=plain, hook=(None, fp16_compress_hook))
    kinds = [_Kind(f"{DDP}, fp16_compress_hook", hooked, DDP, is_exact=False)]
    for name, compression in compressions.items():
        make = functools.partial(_distributed, plain=plain, compression=compression)
        kinds.append(_Kind(f"compression={name}", make, is_exact=False))
    return kinds


def _loop(
    network: torch.nn.Module,
    make_optimizer: MakeOptimizer,
    wrapped: torch.nn.Module | None = None,
    after_backward: Callable[[], object] = lambda: None,
) -> Train:
    """Return a hand-written training loop for ``wrapped``, or for the network itself by default."""
    forward = network if wrapped is None else wrapped
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
    """Return a loop with DDP on the default process group or ``group``; ``hook`` is (state, communication hook)."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel(
        network, process_group=group, gradient_as_bucket_view=gradient_as_bucket_view
    )
    if hook is not None:
        ddp.register_comm_hook(*hook)
    return _loop(network, plain, ddp)


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


def _fsdp(network: Any, plain: MakeOptimizer, group: Any) -> Train:
    """Return a loop with FSDP2 on the default process group or ``group``; each layer with parameters is one unit."""
    from torch.distributed import fsdp, group as groups
    from torch.distributed.device_mesh import DeviceMesh

    used: Any = groups.WORLD if group is None else group
    mesh = DeviceMesh.from_group(used, next(network.parameters()).device.type)
    for layer in [layer for layer in network if next(layer.parameters(), None) is not None]:
        fsdp.fully_shard(layer, mesh=mesh)
    return _loop(network, plain, fsdp.fully_shard(network, mesh=mesh))


def _distributed(network: torch.nn.Module, plain: MakeOptimizer, compression: Any = None) -> Train:
    return _loop(network, lambda p: optim.DistributedOptimizer(plain(p), network, compression=compression))


def _engine(network: torch.nn.Module, plain: MakeOptimizer, **options: Any) -> Train:
    """Return the engine's training loop. A step ends when the engine calls ``on_update``."""
    on_gpu = next(network.parameters()).is_cuda
    engine = AllReduceSGDEngine(usegpu=on_gpu, **options)
    optimizer = plain(network.parameters())

    def train(samples: Sequence[Sample], done: Done) -> None:
        engine.hooks.on_update = lambda state: done()
        criterion = torch.nn.CrossEntropyLoss()
        engine.train(network=network, criterion=criterion, iterator=samples, optimizer=optimizer, extensions=[])

    return train
