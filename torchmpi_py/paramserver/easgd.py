"""Elastic averaging SGD: workers and a centre, the server's values, attract each other.

In an exchange of worker i with the centre c, with a = beta / number of workers: d = a (c - x_i), x_i += d, c -= d.
The sum of all workers and the centre stays what it is. Between exchanges each worker trains by itself.

Source: Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015). TorchMPI's ``EASGDUpdate``
(reference 5.10) computed what to send, and never sent it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import lists
from torchmpi_py.paramserver.update import Update


class EASGDUpdate(Update):
    """An exchange every ``update_frequency`` steps, with what was fetched ``prefetch`` steps before.

    beta: how far all workers together move the centre towards their mean, 0 < beta < 1. Other arguments as for
    ``Update``, without ``send_frequency``: what is sent belongs to the exchange.
    """

    def __init__(self, network: torch.nn.Module, *, beta: float = 0.9, **options: Any) -> None:
        if "send_frequency" in options:
            raise TypeError("EASGDUpdate takes no send_frequency: it sends whenever it integrates")
        if not 0 < beta < 1:
            raise ValueError(f"beta={beta}: give a number between 0 and 1")
        super().__init__(network, **options)
        self.beta = beta

    def integrate(self, served: lists.ServedTensors) -> None:
        """Move towards the centre, and let the centre move as far towards this worker."""
        differences: dict[Tensor, Tensor] = {}

        def attract(centre: Tensor, p: Tensor) -> None:
            step = (centre - p).mul_(self.beta / self.num_workers)
            p.add_(step)
            differences[p] = step.neg_()

        lists.integrate_tensors(served, attract)
        lists.send_tensors(served, [differences[p] for p in served.tensors], "add")
