"""Rules: what a parameter server does to a shard with the part of a sent tensor that belongs to it.

A rule is a function ``fn(shard, payload, **options)`` of two flat tensors of equal size and dtype, that changes the
shard in place. It is carried out by the rank that sends, under the shard's lock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Rule = Callable[..., object]


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
    shard.lerp_(payload, weight)


_BUILT_IN: dict[str, Rule] = {"zero": _zero, "copy": _copy, "add": _add, "scaled_add": _scaled_add, "elastic": _elastic}
_registered: dict[str, Rule] = {}


def register_rule(name: str, fn: Rule) -> None:
    """Let ``send(t, rule=name)`` do ``fn(shard, payload, **options)``. Register it alike on every rank.

    A name may be registered again, for another function; those that are built in (zero, copy, add, scaled_add, elastic)
    may not.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_rule: name={name!r}: give a name")
    if not callable(fn):
        raise TypeError(
            f"register_rule: fn={fn!r}: give a function of (shard, payload) that changes the shard in place"
        )
    if name in _BUILT_IN:
        raise ValueError(f"register_rule: {name!r} is built in; take another name")
    _registered[name] = fn


def checked(name: str, options: Mapping[str, Any]) -> Rule:
    """The rule called ``name``. ValueError if there is none, TypeError if it does not take these options."""
    rule = _BUILT_IN.get(name) or _registered.get(name)
    if rule is None:
        known = ", ".join([*_BUILT_IN, *_registered])
        raise ValueError(f"send: rule {name!r} is unknown; known rules: {known}")
    try:
        inspect.signature(rule).bind(None, None, **options)
    except TypeError as error:
        raise TypeError(f"send: rule {name!r} does not take the options {dict(options)}: {error}") from None
    except ValueError:
        pass  # a function of C tells no signature
    return rule
