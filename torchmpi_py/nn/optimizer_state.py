"""An optimizer's state, equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.check import digest_of
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import check_rank
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.nn.synchronize import fused

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def broadcast_optimizer_state(optimizer: Any, root: int = 0, *, comm: Communicator | None = None) -> None:
    """Give every rank root's optimizer state: moments, numbers of steps, options of the groups. Collective.

    Where the states are the same, the ranks exchange only a digest. An optimizer without ``state_dict`` and
    ``load_state_dict`` is left as it is. The optimizers are of one kind, over the same parameters in the same order.

    Raises RanksDisagree, on all ranks, where kinds or numbers of parameters differ, or where ``load_state_dict`` has
    changed the state (torch's gives it the dtype of the parameters).
    """
    comm = resolve(comm)
    root = check_rank("broadcast_optimizer_state", "root", root, comm.size)
    if comm.size == 1 or not (hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")):
        return
    if not _differing(optimizer, comm):
        return
    state = _broadcast(optimizer, root, comm)
    if comm.rank != root:
        optimizer.load_state_dict(state)
    if differing := _differing(optimizer, comm):
        raise RanksDisagree(
            f"{type(optimizer).__name__}.load_state_dict has not taken the state of rank {root} as it is, on rank "
            f"{', '.join(map(str, differing))}: load it on every rank"
        )


class OptimizerKind(NamedTuple):
    """What an optimizer's state belongs to."""

    name: str  # of the class
    shapes: list[tuple[int, ...]]  # of the parameters, in the order of the groups

    @classmethod
    def of(cls, name: str, parameters: Iterable[Tensor]) -> OptimizerKind:
        """The kind of an optimizer with these parameters."""
        return cls(name, [tuple(p.shape) for p in parameters])

    def check_saved(self, saved: OptimizerKind) -> None:
        """ValueError, with both, unless a state that was saved of the kind ``saved`` is one of this kind."""
        if saved.name != self.name:
            raise ValueError(f"it was trained by the optimizer {saved.name}, and this one is {self.name}")
        for number, (theirs, mine) in enumerate(zip(saved.shapes, self.shapes, strict=False)):
            if theirs != mine:
                raise ValueError(f"parameter {number} of its {self.name} has shape {theirs}, and of this one {mine}")


def name_of_class(optimizer: Any, transparent: tuple[type, ...] = ()) -> str:
    """Return the names of the optimizer's class and of what it wraps, except ``transparent`` classes: ``A(SGD)``."""
    name, inner = type(optimizer).__qualname__, getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return name
    of_inner = name_of_class(inner, transparent)
    return of_inner if isinstance(optimizer, transparent) else f"{name}({of_inner})"


def load_saved_state(optimizer: Any, state: Any, kind: OptimizerKind, saved: OptimizerKind | None) -> None:
    """Load a state that was saved of the kind ``saved`` (None: not known) into an optimizer of this ``kind``.

    ValueError if the kinds differ.
    """
    if saved is not None:
        kind.check_saved(saved)
    optimizer.load_state_dict(state)
    if saved is None:
        _check_options(optimizer)


def _check_options(optimizer: Any) -> None:
    """ValueError if groups lack options of the optimizer's class, as after loading the state of another class."""
    for group in _groups(optimizer):
        if lacking := sorted(getattr(optimizer, "defaults", {}).keys() - group.keys()):
            raise ValueError(f"it holds no {', '.join(lacking)} of the optimizer {type(optimizer).__qualname__}")


class _Stand(NamedTuple):
    """A summary of an optimizer on a rank."""

    kind: str
    num_parameters: list[int]  # of each group
    digest: bytes


@dataclass(frozen=True)
class _Missing:
    """A tensor, in a state that travels without its tensors."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str


def _differing(optimizer: Any, comm: Communicator) -> list[int]:
    """The ranks with another state than rank 0. Collective; RanksDisagree if kinds or groups differ."""
    state = optimizer.state_dict()
    # Not the groups of the optimizer: those of a ShardedOptimizer hold what the rank updates.
    sizes = [len(group["params"]) for group in (state.get("param_groups", []) if isinstance(state, dict) else [])]
    content = repr([(name, _content(leaf)) for name, leaf in _entries(state, "")])
    digest = hashlib.blake2b(content.encode(), digest_size=16).digest()
    stands = verbs.allgather_object(_Stand(name_of_class(optimizer), sizes, digest), comm=comm)
    if any(stand[:2] != stands[0][:2] for stand in stands):
        named = "; ".join(f"rank {rank}: {stand.kind} of {stand.num_parameters}" for rank, stand in enumerate(stands))
        raise RanksDisagree(f"the ranks' optimizers differ in kind, or in the parameters of their groups: {named}")
    return [rank for rank, stand in enumerate(stands) if stand != stands[0]]


def _entries(content: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a state, each with its path; the order in which its dicts were filled does not count."""
    if isinstance(content, dict):
        for key in sorted(content, key=repr):
            yield from _entries(content[key], f"{name}.{key!r}")
    elif isinstance(content, (list, tuple)):
        for index, value in enumerate(content):
            yield from _entries(value, f"{name}[{index}]")
    else:
        yield name, content


def _content(leaf: Any) -> Any:
    """The content of a leaf that is compared: its bits; of an object that is no data, its type."""
    if isinstance(leaf, Tensor) and leaf.is_sparse:  # momentum of sparse gradients
        return [digest_of(part) for part in (leaf.coalesce().indices(), leaf.coalesce().values())]
    if isinstance(leaf, Tensor):
        return digest_of(leaf.detach())
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    return leaf if isinstance(leaf, _PLAIN) else type(leaf).__qualname__


def _broadcast(optimizer: Any, root: int, comm: Communicator) -> Any:
    """Root's state, its tensors on this rank's devices. Collective."""
    state = optimizer.state_dict()
    if comm.rank != root:
        state = None
    # The structure travels by pickle, with a description in the place of each dense tensor; the values follow, fused.
    bare = tree_map_only(Tensor, lambda x: x if x.is_sparse else _Missing(x.shape, x.dtype, x.device.type), state)
    bare = verbs.broadcast_object(bare, root, comm=comm)
    if comm.rank != root:
        device_of = {p.device.type: p.device for group in _groups(optimizer) for p in group["params"]}
        state = tree_map_only(
            _Missing,
            lambda x: torch.empty(x.shape, dtype=x.dtype, device=device_of.get(x.device_type, x.device_type)),
            bare,
        )
    tensors = [leaf.detach() for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and not leaf.is_sparse]
    fused(tensors, lambda flat: verbs.broadcast(flat, root, comm=comm))
    return state


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return getattr(optimizer, "param_groups", [])
