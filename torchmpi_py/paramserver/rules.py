"""Rules: what a parameter server does to a shard with the part of a sent tensor that belongs to it.

A rule is a function ``fn(shard, payload, **options)`` of two flat tensors of equal size and dtype, that changes the
shard in place. A rule that keeps a state from send to send also gets a ``Memory``: ``fn(shard, payload, memory,
**options)``. It is carried out under the shard's lock, by the rank that sends, or, for a shard on another node, by the
service there.

Optimizers are rules whose payload is a gradient, and whose state lies with the shard. They are torch's own: one send of
a gradient is one step of ``torch.optim``'s optimizer of that name on the shard, with the same options and the same
defaults. Every worker's send is a step, so n workers do n times as many.
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

_IN_ONE_TENSOR: dict[str, Any] = {"foreach": False, "maximize": False}  # for the functions of torch.optim


class Memory(NamedTuple):
    """A rule's state with a shard: ``slots``, tensors like the shard, and ``times``, a number (float64); at first 0."""

    slots: list[Tensor]
    times: Tensor


class Rule(NamedTuple):
    """A function and what it needs.

    memory: "mean" (a count that every server has), or "optimizer" (``num_slots`` slots and a count, on a server that
    was made for this rule). needs_bits: floating-point numbers of at least so many; 0 for any numbers. needs_payload:
    whether what is sent matters.
    """

    fn: Callable[..., object]
    memory: Literal["mean", "optimizer"] | None = None
    num_slots: int = 0
    needs_bits: int = 0
    needs_payload: bool = True


def _zero(shard: Tensor, payload: Tensor) -> None:
    """Zero, whatever is sent."""
    shard.zero_()


def _copy(shard: Tensor, payload: Tensor) -> None:
    """The values sent take the place of the shard's."""
    shard.copy_(payload)


def _add(shard: Tensor, payload: Tensor) -> None:
    """The values sent are added."""
    shard.add_(payload)


def _scaled_add(shard: Tensor, payload: Tensor, *, scale: float) -> None:
    """The values sent are added ``scale`` times: a step of gradient descent, with minus the learning rate."""
    shard.add_(payload, alpha=scale)


def _elastic(shard: Tensor, payload: Tensor, *, weight: float) -> None:
    """The shard moves towards the values sent, by ``weight`` of the distance; with 0.5 to their mean."""
    _move(shard, payload, weight)


def _average(shard: Tensor, payload: Tensor, memory: Memory) -> None:
    """The mean of all sends by this rule since the last send by another one; values from before do not count."""
    memory.times.add_(1)
    _move(shard, payload, 1 / memory.times.item())


def _move(shard: Tensor, payload: Tensor, weight: float) -> None:
    """Move by ``weight`` of the distance; by all of it also from what is not finite, or so far that the distance is."""
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
    """A step of ``torch.optim.SGD``; the slot is the momentum buffer, at first the first gradient."""
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
    """A step of ``torch.optim.Adagrad``; the slot is the sum of squares."""
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
    """A step of ``torch.optim.Adam``; the slots are the mean of gradients and of their squares."""
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
    """Let ``send(t, rule=name)`` do ``fn(shard, payload, **options)``. Register it alike on every rank.

    The function changes ``shard`` in place, and nothing else: ``payload`` may be the sender's own memory. It keeps
    neither. It runs without autograd, in another thread, maybe of another process, to which options travel by pickle.

    With ``num_slots`` > 0 the rule is an optimizer, for servers made with ``init(tensor, optimizer=name)``, and called
    as ``fn(shard, payload, memory, **options)``: ``memory.slots`` are so many tensors like the shard, and
    ``memory.times`` a number, all kept from send to send and 0 at first.

    A name may be registered again, for another function; built-in names may not.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_rule: name={name!r}: give a name")
    if not callable(fn):
        raise TypeError(
            f"register_rule: fn={fn!r}: give a function of (shard, payload) that changes the shard in place"
        )
    check_count("register_rule: num_slots", num_slots, 0)
    if name in _BUILT_IN:
        raise ValueError(f"register_rule: {name!r} is built in; take another name")
    _rules[name] = Rule(fn, "optimizer", num_slots) if num_slots else Rule(fn)


def named(call: str, name: str) -> Rule:
    """The rule called ``name``, or a ValueError that lists them."""
    if name not in _rules:
        raise ValueError(f"{call}: rule {name!r} is unknown; known rules: {', '.join(_rules)}")
    return _rules[name]


def check_optimizer(name: str, options: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
    """ValueError or TypeError unless the optimizer called ``name`` can update these parameters, with these options."""
    optimizer(name)
    for dtype in {p.dtype for p in parameters}:
        checked(name, options, dtype, name)


def optimizer(name: str) -> Rule:
    """The optimizer called ``name``, or a ValueError that lists them."""
    known = [known for known, rule in _rules.items() if rule.memory == "optimizer"]
    if name not in known:
        raise ValueError(f"paramserver.init: optimizer={name!r} is unknown; known optimizers: {', '.join(known)}")
    return _rules[name]


def checked(name: str, options: Mapping[str, Any], dtype: torch.dtype, of_server: str | None) -> Rule:
    """The rule called ``name``, for a server of this dtype made for the optimizer ``of_server``.

    ValueError if there is none, or not for this server; TypeError if it does not take these options.
    """
    rule = named("send", name)
    if rule.memory == "optimizer" and name != of_server:
        made = "for no optimizer" if of_server is None else f"for optimizer {of_server!r}"
        raise ValueError(
            f"send: rule {name!r} needs a server that was made for it, and this one was made {made}: "
            f"paramserver.init(tensor, optimizer={name!r})"
        )
    if rule.needs_bits:
        bits = 8 * dtype.itemsize if dtype.is_floating_point else 4 * dtype.itemsize if dtype.is_complex else 0
        if bits < rule.needs_bits:
            at_least = f" of at least {rule.needs_bits} bits" if rule.needs_bits > 1 else ""
            raise ValueError(f"send: rule {name!r} needs floating-point numbers{at_least}; this server holds {dtype}")
    if refused := _refused(rule, tuple(options)):
        raise TypeError(f"send: rule {name!r} does not take the options {dict(options)}: {refused}")
    if options and name in _BUILT_IN and (wrong := _wrong(name, options, dtype)):
        raise ValueError(f"send: rule {name!r} does not take the options {dict(options)}: {wrong}")
    return rule


def _wrong(name: str, options: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Why a built-in rule does not take these values; empty if it does."""
    for option, value in options.items():
        if option == "betas":
            if not (isinstance(value, (tuple, list)) and len(value) == 2 and all(0 <= beta < 1 for beta in value)):
                return f"betas={value!r}: torch takes two numbers of at least 0 and less than 1"
        elif not isinstance(value, (Number, np.generic, np.ndarray, Tensor)):
            return f"{option} is no number"
        elif option == "scale" and isinstance(value, float) and not (dtype.is_floating_point or dtype.is_complex):
            return f"scale is a float, and the elements are {dtype}"
        elif option in _NOT_NEGATIVE and not value >= 0:  # type: ignore[operator]
            return f"{option}={value!r}: torch takes no negative number"
    if options.get("nesterov") and (not options.get("momentum", 0) or options.get("dampening", 0)):
        return "nesterov=True takes a momentum, and no dampening"
    return ""


@functools.lru_cache(maxsize=1024)
def _refused(rule: Rule, options: tuple[str, ...]) -> str:
    """Why a rule does not take options of these names; empty if it does."""
    try:
        inspect.signature(rule.fn).bind(*[None] * (2 if rule.memory is None else 3), **dict.fromkeys(options))
    except TypeError as error:
        return str(error)
    except ValueError:
        pass  # a function of C tells no signature
    return ""
