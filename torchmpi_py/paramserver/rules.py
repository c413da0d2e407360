"""Rules: functions that change a shard of a parameter server when a part of a tensor is sent to the shard.

A rule is a function ``fn(shard, payload, **options)`` of two flat tensors of equal size and dtype, which changes the
shard in place. A rule with a state also gets a ``Memory``: ``fn(shard, payload, memory, **options)``. The sending rank
runs the rule while it holds the lock of the shard. For a shard on another node, the service of that node runs the rule.

Optimizers are rules whose payload is a gradient and whose state is stored with the shard. They call torch's functions.
So one send of a gradient is one step of the ``torch.optim`` optimizer with the same name, options and defaults. Every
send of every worker is a step, so n workers take n times as many steps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from torchmpi_py.core.tensors import check_count

_IN_ONE_TENSOR: dict[str, Any] = {"foreach": False, "maximize": False}  # arguments of torch.optim's functions


class Memory(NamedTuple):
    """The state of a rule for one shard. All values start at 0.

    ``slots`` are tensors of the shard's size and dtype. ``times`` is a float64 tensor with one number, in which the
    rule counts its applications.
    """

    slots: list[Tensor]
    times: Tensor


class Rule(NamedTuple):
    """A rule: its function, and its requirements on the server.

    If ``memory`` is "mean", the state of the rule is a counter that every server has. If it is "optimizer", the state
    is ``num_slots`` slots and a counter on a server that was created for this rule. ``needs_bits`` is the minimum
    number of bits of a floating-point element, or 0 if the rule accepts every dtype. ``needs_payload`` is False if the
    rule ignores the payload.
    """

    fn: Callable[..., object]
    memory: Literal["mean", "optimizer"] | None = None
    num_slots: int = 0
    needs_bits: int = 0
    needs_payload: bool = True


def _zero(shard: Tensor, payload: Tensor) -> None:
    """Set the shard to zero, and ignore the payload."""
    shard.zero_()


def _copy(shard: Tensor, payload: Tensor) -> None:
    """Replace the values of the shard by the payload."""
    shard.copy_(payload)


def _add(shard: Tensor, payload: Tensor) -> None:
    """Add the payload to the shard."""
    shard.add_(payload)


def _scaled_add(shard: Tensor, payload: Tensor, *, scale: float) -> None:
    """Add ``scale`` times the payload. If ``scale`` is minus the learning rate, this is a gradient descent step."""
    shard.add_(payload, alpha=scale)


def _elastic(shard: Tensor, payload: Tensor, *, weight: float) -> None:
    """Move the shard towards the payload by the fraction ``weight`` of the distance; 0.5 gives the mean of both."""
    _move(shard, payload, weight)


def _average(shard: Tensor, payload: Tensor, memory: Memory) -> None:
    """Set the shard to the mean of the payloads of this rule since the last send with a different rule."""
    memory.times.add_(1)
    _move(shard, payload, 1 / memory.times.item())


def _move(shard: Tensor, payload: Tensor, weight: float) -> None:
    """Move the shard towards the payload by the fraction ``weight`` of their distance."""
    # If the fraction is 1, copy the payload, because the computed distance is not finite if the shard contains values
    # that are not finite, or if the distance overflows.
    if weight == 1:
        shard.copy_(payload)
    else:
        shard.lerp_(payload, weight)


def _sgd(
    shard: Tensor,
    grad: Tensor,
    memory: Memory,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Take a step of ``torch.optim.SGD``. The slot is the momentum buffer, which starts as the first gradient."""
    (buffer,) = memory.slots
    buffers: list[Any] = [buffer if momentum and memory.times.item() else None]
    choices: dict[str, Any] = {"dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
    sgd([shard], [grad], buffers, lr=lr, momentum=momentum, **choices, **_IN_ONE_TENSOR)
    if momentum:
        if buffers[0] is not buffer:
            buffer.copy_(buffers[0])
        memory.times.add_(1)


def _adagrad(
    shard: Tensor,
    grad: Tensor,
    memory: Memory,
    *,
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-10,
) -> None:
    """Take a step of ``torch.optim.Adagrad``. The slot is the sum of the squared gradients."""
    choices: dict[str, Any] = {"lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
    adagrad([shard], [grad], memory.slots, [memory.times], lr=lr, **choices, **_IN_ONE_TENSOR)


def _adam(
    shard: Tensor,
    grad: Tensor,
    memory: Memory,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """Take a step of ``torch.optim.Adam``. The slots are the moving averages of the gradients and of their squares."""
    mean, square = memory.slots
    choices: dict[str, Any] = {
        "beta1": betas[0],
        "beta2": betas[1],
        "weight_decay": weight_decay,
        "eps": eps,
        "amsgrad": False,
    }
    adam([shard], [grad], [mean], [square], [], [memory.times], lr=lr, **choices, **_IN_ONE_TENSOR)


_rules: dict[str, Rule] = {
    "zero": Rule(_zero, needs_payload=False),
    "copy": Rule(_copy),
    "add": Rule(_add),
    "scaled_add": Rule(_scaled_add),
    "average": Rule(_average, "mean", needs_bits=32),
    "elastic": Rule(_elastic, needs_bits=1),
    "sgd": Rule(_sgd, "optimizer", 1, needs_bits=1),
    "adagrad": Rule(_adagrad, "optimizer", 1, needs_bits=1),
    "adam": Rule(_adam, "optimizer", 2, needs_bits=1),
}
_BUILT_IN = frozenset(_rules)
_NOT_NEGATIVE = ("lr", "momentum", "weight_decay", "lr_decay", "eps")


def register_rule(name: str, fn: Callable[..., object], num_slots: int = 0) -> None:
    """Register a function as a rule for ``send(tensor, rule=name)``. Register the same function on every rank.

    ``fn(shard, payload, **options)`` gets two flat tensors of the same size and dtype, and changes ``shard`` in place.
    It must not change ``payload``, which may be the sender's own memory, and must not keep references to ``shard`` or
    ``payload``. It runs without autograd in another thread, which may belong to another process, so the options of a
    send must be picklable.

    With ``num_slots`` > 0, the rule is an optimizer for servers from ``init(tensor, optimizer=name)``. The server then
    calls ``fn(shard, payload, memory, **options)``, where ``memory.slots`` is a list of ``num_slots`` tensors with the
    size and dtype of the shard, and ``memory.times`` is a tensor with one number. All of these values start at 0, and
    the server keeps them between sends.

    Args:
        name (str): name of the rule. A later call with the same name replaces the function.
        fn (callable): function that changes the shard in place.
        num_slots (int): number of tensors that the rule keeps per shard. Default 0: the rule has no state.

    Raises:
        TypeError: ``name`` is not a string or is empty, or ``fn`` is not callable.
        ValueError: ``name`` is a built-in rule, or ``num_slots`` is not an int of at least 0.

    Examples:
        >>> mpi.paramserver.register_rule("largest", lambda shard, payload: shard.copy_(shard.maximum(payload)))
        >>> server = mpi.paramserver.init(torch.zeros(3))
        >>> sent = server.send(torch.tensor([-1.0, 0.0, 1.0]), rule="largest").wait()
        >>> server.receive().wait()
        tensor([0., 0., 1.])
        >>> server.free()
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_rule: expected a name, found name={name!r}; pass a string that is not empty")
    if not callable(fn):
        raise TypeError(
            f"register_rule: expected a function, found fn={fn!r}; pass a function that changes a shard in place"
        )
    check_count("register_rule: num_slots", num_slots, 0)
    if name in _BUILT_IN:
        raise ValueError(f"register_rule: {name!r} is a built-in rule; choose a different name")
    _rules[name] = Rule(fn, "optimizer", num_slots) if num_slots else Rule(fn)


def named(call: str, name: str) -> Rule:
    """Return the rule called ``name``. If the name is unknown, raise a ValueError that lists all rules."""
    if name not in _rules:
        raise ValueError(f"{call}: rule {name!r} is unknown; use one of {', '.join(_rules)}")
    return _rules[name]


def check_optimizer(name: str, options: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
    """Raise ValueError or TypeError unless the optimizer called ``name`` accepts these parameters and options."""
    optimizer(name)
    for dtype in {p.dtype for p in parameters}:
        checked(name, options, dtype, name)


def optimizer(name: str) -> Rule:
    """Return the optimizer called ``name``. If the name is unknown, raise a ValueError that lists all optimizers."""
    known = [known for known, rule in _rules.items() if rule.memory == "optimizer"]
    if name not in known:
        raise ValueError(f"parameter server: optimizer={name!r} is unknown; use one of {', '.join(known)}")
    return _rules[name]


def checked(name: str, options: Mapping[str, Any], dtype: torch.dtype, of_server: str | None) -> Rule:
    """Return the rule called ``name`` for a server of this dtype that was created for the optimizer ``of_server``.

    Raise ValueError if the rule is unknown, does not fit the server, or does not accept the value of an option. Raise
    TypeError if the rule does not accept options of these names.
    """
    rule = named("send", name)
    if rule.memory == "optimizer" and name != of_server:
        of_this = "without an optimizer" if of_server is None else f"for optimizer {of_server!r}"
        raise ValueError(
            f"send: rule {name!r} needs a server that was created for the rule, but this server was created {of_this}; "
            f"use paramserver.init(tensor, optimizer={name!r})"
        )
    if rule.needs_bits:
        bits = 8 * dtype.itemsize if dtype.is_floating_point else 4 * dtype.itemsize if dtype.is_complex else 0
        if bits < rule.needs_bits:
            at_least = f" of at least {rule.needs_bits} bits" if rule.needs_bits > 1 else ""
            raise ValueError(f"rule {name!r} needs floating-point numbers{at_least}, not {dtype}; use torch.float32")
    if reason := _wrong_names(rule, tuple(options)):
        raise TypeError(f"send: the options {dict(options)} are not valid for rule {name!r}: {reason}")
    if options and name in _BUILT_IN and (reason := _wrong_values(options, dtype)):
        raise ValueError(f"send: the options {dict(options)} are not valid for rule {name!r}: {reason}")
    return rule


def _wrong_values(options: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Return the reason why a built-in rule does not accept these values, or "" if it accepts them."""
    for option, value in options.items():
        if option == "betas":
            if not (isinstance(value, (tuple, list)) and len(value) == 2 and all(0 <= beta < 1 for beta in value)):
                return f"betas={value!r}: torch expects two numbers of at least 0 and less than 1"
        elif not isinstance(value, (Number, np.generic, np.ndarray, Tensor)):
            return f"{option}={value!r}: expected a number"
        elif option == "scale" and isinstance(value, float) and not (dtype.is_floating_point or dtype.is_complex):
            return f"scale is a float, but the elements are {dtype}; pass an int"
        elif option in _NOT_NEGATIVE and not value >= 0:  # type: ignore[operator]
            return f"{option}={value!r}: torch expects a number of at least 0"
    if options.get("nesterov") and (not options.get("momentum", 0) or options.get("dampening", 0)):
        return "nesterov=True needs a momentum above 0, and dampening=0"
    return ""


@functools.lru_cache(maxsize=1024)
def _wrong_names(rule: Rule, options: tuple[str, ...]) -> str:
    """Return the reason why a rule does not accept options of these names, or "" if it accepts them."""
    try:
        inspect.signature(rule.fn).bind(*[None] * (2 if rule.memory is None else 3), **dict.fromkeys(options))
    except TypeError as error:
        return str(error)
    except ValueError:
        pass  # Python cannot read the signatures of some functions that are written in C.
    return ""
