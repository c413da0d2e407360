"""Who takes part: what a contestant is, and the flavours of this package.

The peers are in ``raw_mpi.py`` and ``torch_groups.py``, with our own backend of torch.distributed, the copies that no
collective can be expected to beat in ``limits.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torchmpi_py as mpi
from torchmpi_py.bench.buffers import Slot
from torchmpi_py.bench.cases import Task

SELECTOR, SYMMETRIC, TORCHMPI = WAYS = "selector", "symmetric", "torchmpi"
"""What may be asked for beside flavours: none forced, that on symmetric tensors, and torch.distributed over us."""
RAW_MPI, GLOO, TORCH_TORCHMPI = "raw MPI", "torch gloo", "torch torchmpi"
COPY, DEVICE_COPY, HOST_COPY = LIMITS = "copy", "device copy", "host copy"

Call = Callable[[], object]
Take = Callable[[], Slot]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to do the task. ``bind`` takes a slot and returns the call on it, ready to be timed."""

    name: str
    bind: Callable[[Take], Call]
    is_ours: bool = False
    is_symmetric: bool = False

    @property
    def has_values(self) -> bool:
        """Whether there is a result to check."""
        return self.name not in LIMITS


def ours(task: Task, name: str, *, is_symmetric: bool = False, asynchronous: bool = False) -> Contestant:
    """A verb of this package; ``name`` is a flavour, or "selector" to force none, or that on symmetric tensors."""
    options: dict[str, Any] = {} if name in (SELECTOR, SYMMETRIC) else {"flavour": name}
    if task.verb.reduces:
        options["op"] = task.op

    def bind(take: Take) -> Call:
        slot = take()
        verb = getattr(mpi, f"{task.verb.name}_async" if asynchronous else task.verb.name)
        given = options if slot.out is None else options | {"out": slot.out}
        call = functools.partial(verb, slot.x, **given)
        return asynchronously(call) if asynchronous else call

    is_symmetric = is_symmetric or name == SYMMETRIC
    label = f"{name}, symmetric" if is_symmetric and name != SYMMETRIC else name
    return Contestant(f"{label}, async" if asynchronous else label, bind, is_ours=True, is_symmetric=is_symmetric)


def asynchronously(call: Callable[[], Any]) -> Call:
    """``call``, which returns a handle, and then waiting for it."""
    return lambda: call().wait()
