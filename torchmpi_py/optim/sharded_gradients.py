"""The gradients of which each rank holds a part: their common norm, and an overflow that all ranks have to see."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.nn.elements import is_finite


def clip(gradients: list[Tensor], max_norm: float, norm_type: float, comm: Communicator) -> Tensor:
    """Scale gradients in place so that the norm of all ranks' together is at most ``max_norm``. Collective.

    Returns the norm before, in float64.
    """
    norms = [torch.linalg.vector_norm(x, norm_type).double().cpu() for x in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=torch.double)
    if math.isinf(norm_type):
        verbs.allreduce(norm, op="max", comm=comm)
    else:
        norm = verbs.allreduce(norm**norm_type, comm=comm) ** (1 / norm_type)
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for gradient in gradients:
        gradient *= factor
    return norm


def share_overflow(gradients: list[Tensor], place: Tensor, comm: Communicator) -> None:
    """Where a rank's gradients are not all finite, the other ranks get a NaN in ``place``. Collective.

    So a GradScaler skips a step on all ranks or on none.
    """
    is_finite_here = all(is_finite(x) for x in gradients)
    if verbs.allreduce(int(is_finite_here), op="min", comm=comm) == 0 and is_finite_here:
        place[(0,) * place.dim()] = math.nan  # not view(-1): it may have gaps, or be channels_last
