"""The norm of gradients of which some are split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.nn.split_parameters import split_of


def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` that counts the parts of split parameters on all ranks that hold them.

    Scales gradients in place so that the norm of all together is at most ``max_norm``; returns the norm, a number in a
    tensor. Collective over the ranks that share split layers. Torch's is wrong with those: each rank would scale by the
    norm of its own parts.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients_of: dict[Communicator | None, list[Tensor]] = {None: []}
    for p in parameters:
        split = split_of(p)
        gradients = gradients_of.setdefault(None if split is None else split.comm, [])  # all ranks make the same calls
        if p.grad is not None:
            gradients.append(p.grad)
    norms = []
    for comm, gradients in gradients_of.items():
        local = norm_of(gradients, norm_type)
        norms.append(local if comm is None else combined(local, norm_type, comm))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    scale_to(norm, max_norm, [p.grad for p in parameters if p.grad is not None])
    return norm


def norm_of(gradients: list[Tensor], norm_type: float) -> Tensor:
    """The norm of all together, in float64."""
    dense = [x.coalesce().values() if x.is_sparse else x for x in gradients]
    norms = [torch.linalg.vector_norm(x, norm_type).double().cpu() for x in dense if x.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.double, device="cpu")
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def combined(norm: Tensor, norm_type: float, comm: Communicator) -> Tensor:
    """The norm of what all ranks hold, from each rank's. Collective."""
    if math.isinf(norm_type):
        largest: Tensor = verbs.allreduce(norm.clone(), op="max", comm=comm)
        return largest
    total: Tensor = verbs.allreduce(norm**norm_type, comm=comm) ** (1 / norm_type)
    return total


def scale_to(norm: Tensor, max_norm: float, gradients: list[Tensor]) -> None:
    """Scale gradients of this norm to one of at most ``max_norm``."""
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for gradient in gradients:
        gradient *= factor
