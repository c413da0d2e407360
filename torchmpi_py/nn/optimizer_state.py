"""An optimizer's state, equal on all ranks."""

from __future__ import annotations

import hashlib
import io
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.check import digest_of
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import check_rank
from torchmpi_py.errors import RanksDisagree

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def broadcast_optimizer_state(optimizer: Any, root: int = 0, *, comm: Communicator | None = None) -> None:
    """Give every rank root's optimizer state: moments, numbers of steps, options of the groups. Collective.

    Where the states are the same, the ranks exchange only a digest. The optimizer may be another object with a state,
    such as a scheduler. One without ``state_dict`` and ``load_state_dict`` is left as it is. The optimizers are of one
    kind, over the same parameters in the same order.

    Raises RanksDisagree, on all ranks, where kinds or numbers of parameters differ, or where ``load_state_dict`` has
    changed the state (torch's gives it the dtype of the parameters).
    """
    comm = resolve(comm)
    root = check_rank("broadcast_optimizer_state", "root", root, comm.size)
    if comm.size == 1 or not (hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")):
        return
    if not _differing(optimizer, comm):
        return
    # In one piece, because states differ seldom: where a rank is new, or has left join() early.
    torch.save(optimizer.state_dict() if comm.rank == root else None, content := io.BytesIO())
    content = io.BytesIO(verbs.broadcast_object(content.getvalue(), root, comm=comm))
    if comm.rank != root:
        # A tensor that is on a GPU of root comes to this rank's own.
        gpus = {f"cuda:{number}": "cuda" for number in range(torch.cuda.device_count())}
        optimizer.load_state_dict(torch.load(content, map_location=gpus, weights_only=False))
    if differing := _differing(optimizer, comm):
        raise RanksDisagree(
            f"{type(optimizer).__name__}.load_state_dict has not taken the state of rank {root} as it is, on rank "
            f"{', '.join(map(str, differing))}: load it on every rank"
        )


class OptimizerKind(NamedTuple):
    """What an optimizer's state belongs to."""

    name: str  # of the class
    shapes: list[tuple[int, ...]]  # of the parameters, in the order of the groups

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


def _differing(optimizer: Any, comm: Communicator) -> list[int]:
    """The ranks with another state than rank 0. Collective; RanksDisagree if kinds or groups differ."""
    state = optimizer.state_dict()
    # Not the groups of the optimizer: those of a ShardedOptimizer hold what the rank updates.
    sizes = [len(group["params"]) for group in (state.get("param_groups", []) if isinstance(state, dict) else [])]
    digest = hashlib.blake2b(repr(_content(state)).encode(), digest_size=16).digest()
    kinds = verbs.allgather_object((name_of_class(optimizer), sizes, digest), comm=comm)
    if any(kind[:2] != kinds[0][:2] for kind in kinds):
        named = "; ".join(f"rank {rank}: {name} of {sizes}" for rank, (name, sizes, _) in enumerate(kinds))
        raise RanksDisagree(f"the ranks' optimizers differ in kind, or in the parameters of their groups: {named}")
    return [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]


def _content(x: Any) -> Any:
    """The content that is compared: a tensor's bits, a dict's items in any order, the type of an object of no data."""
    if isinstance(x, dict):
        return sorted(((repr(key), _content(value)) for key, value in x.items()), key=itemgetter(0))
    if isinstance(x, (list, tuple)):
        return [_content(value) for value in x]
    if isinstance(x, Tensor):
        return digest_of(x.detach().to_dense())  # momentum of sparse gradients is sparse
    if isinstance(x, np.ndarray):
        return x.tobytes()
    return x if isinstance(x, _PLAIN) else type(x).__qualname__
