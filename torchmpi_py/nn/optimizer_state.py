"""Make the state of an optimizer equal on all ranks, and check whether a saved state fits an optimizer."""

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
    """Give every rank the optimizer state of ``root``: moments, step counts and options of the groups.

    Every rank of ``comm`` must make this call. **Overwrites** the state of ``optimizer`` on the ranks other than
    ``root``. If all states are equal already, the ranks only exchange a digest. The optimizers must be of one class,
    with the same parameters in the same order.

    Args:
        optimizer (torch.optim.Optimizer): optimizer, or another object with ``state_dict`` and ``load_state_dict``,
            such as a scheduler. An object without these methods is not changed.
        root (int): rank whose state is sent; default 0.
        comm (Communicator): ranks that make this call; default None, the current level.

    Raises:
        RanksDisagree: on every rank, if classes or numbers of parameters differ, or if ``load_state_dict`` has changed
            the state (torch's method converts it to the dtype of the parameters).
        TypeError: ``root`` is not an integer.
        ValueError: ``root`` is not a rank of ``comm``.
    """
    comm = resolve(comm)
    root = check_rank("broadcast_optimizer_state", "root", root, comm.size)
    if comm.size == 1 or not (hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")):
        return
    if not _differing(optimizer, comm):
        return
    # Send the whole state: states differ rarely, for example if a rank is new or has left join() early.
    torch.save(optimizer.state_dict() if comm.rank == root else None, content := io.BytesIO())
    content = io.BytesIO(verbs.broadcast_object(content.getvalue(), root, comm=comm))
    if comm.rank != root:
        # A tensor on a GPU of root is loaded onto this rank's own GPU.
        gpus = {f"cuda:{number}": "cuda" for number in range(torch.cuda.device_count())}
        optimizer.load_state_dict(torch.load(content, map_location=gpus, weights_only=False))
    if others := _differing(optimizer, comm):
        raise RanksDisagree(
            f"load_state_dict of {type(optimizer).__name__} has changed the state of rank {root} on these ranks: "
            f"{', '.join(map(str, others))}; call load_state_dict with the same state on every rank"
        )


class OptimizerKind(NamedTuple):
    """The class of an optimizer and the shapes of its parameters, which a saved state has to match."""

    name: str  # name of the optimizer's class
    shapes: list[tuple[int, ...]]  # shapes of the parameters, in the order of the groups

    def check_saved(self, saved: OptimizerKind) -> None:
        """Raise ValueError if a state of the optimizer ``saved`` does not fit this optimizer."""
        if saved.name != self.name:
            raise ValueError(f"saved with the optimizer {saved.name}, but this run has {self.name}; use {saved.name}")
        for number, (theirs, mine) in enumerate(zip(saved.shapes, self.shapes, strict=False)):
            if theirs != mine:
                raise ValueError(f"parameter {number} has shape {mine}, but {theirs} in the state; use the saved shape")


def name_of_class(optimizer: Any, transparent: tuple[type, ...] = ()) -> str:
    """Return the names of the classes of an optimizer and of the optimizers that it wraps, such as ``A(SGD)``.

    The names of classes in ``transparent`` are omitted.
    """
    name, inner = type(optimizer).__qualname__, getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return name
    of_inner = name_of_class(inner, transparent)
    return of_inner if isinstance(optimizer, transparent) else f"{name}({of_inner})"


def _differing(optimizer: Any, comm: Communicator) -> list[int]:
    """Return the ranks whose state differs from rank 0's. All ranks of ``comm`` must call it.

    Raise RanksDisagree if the optimizers differ in their class or in the sizes of their groups.
    """
    state = optimizer.state_dict()
    # Read the groups of the state, because the groups of a ShardedOptimizer contain only this rank's shards.
    sizes = [len(group["params"]) for group in (state.get("param_groups", []) if isinstance(state, dict) else [])]
    digest = hashlib.blake2b(repr(_content(state)).encode(), digest_size=16).digest()
    kinds = verbs.allgather_object((name_of_class(optimizer), sizes, digest), comm=comm)
    if any(kind[:2] != kinds[0][:2] for kind in kinds):
        texts = "; ".join(f"rank {rank}: {name} of {sizes}" for rank, (name, sizes, _) in enumerate(kinds))
        raise RanksDisagree(f"the optimizers differ ({texts}); create one optimizer, with equal groups, on all ranks")
    return [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]


def _content(x: Any) -> Any:
    """Return comparable content: the bits of a tensor, the sorted items of a dict, or the class of another object."""
    if isinstance(x, dict):
        return sorted(((repr(key), _content(value)) for key, value in x.items()), key=itemgetter(0))
    if isinstance(x, (list, tuple)):
        return [_content(value) for value in x]
    if isinstance(x, Tensor):
        return digest_of(x.detach().to_dense())  # The momentum of sparse gradients is sparse.
    if isinstance(x, np.ndarray):
        return x.tobytes()
    return x if isinstance(x, _PLAIN) else type(x).__qualname__
