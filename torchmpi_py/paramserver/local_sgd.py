"""Local SGD: every rank trains by itself, and now and then all take the mean of their parameters.

There is no server in it. It is the baseline with which the asynchronous ways are to be compared: it sends as little as
they do, but all ranks wait for the slowest one in every exchange.

Source: McDonald, Hall, Mann: Distributed training strategies for the structured perceptron (2010); Stich: Local SGD
converges fast and communicates little (2019).
"""

from __future__ import annotations

import torch

from torchmpi_py import nn
from torchmpi_py.core import communicators
from torchmpi_py.errors import ParameterServerError, RanksDisagree
from torchmpi_py.paramserver import agreement
from torchmpi_py.paramserver.timetable import Timetable


class PeriodicAveraging:
    """Call ``update(step)`` once per training step, after the optimizer's, with the step's number, on every rank.

    Parameters, and buffers of floating point, are averaged over the ranks of ``level`` in the steps D+U, D+2U, ...,
    with D = ``init_delay`` and U = ``update_frequency``. What the optimizer keeps (momentum) stays with each rank.
    """

    def __init__(
        self, network: torch.nn.Module, *, level: int = 0, update_frequency: int = 10, init_delay: int = 100
    ) -> None:
        self.timetable = Timetable(init_delay, update_frequency)
        self.network = network
        self.is_free = False
        self._level = level
        asked = agreement.gathered(
            communicators.communicator(level), "PeriodicAveraging", (init_delay, update_frequency)
        )
        if any(other != asked[0] for other in asked):
            raise RanksDisagree(
                f"PeriodicAveraging: (init_delay, update_frequency) by rank: {asked}; give the same on all ranks"
            )

    def update(self, step: int) -> None:
        """Average, if it is due in this step. Collective then."""
        if self.is_free:
            raise ParameterServerError(f"update({step}): this PeriodicAveraging was freed; make another")
        if self.timetable.at(step).integrate:
            with communicators.at(self._level):
                nn.synchronize_parameters(self.network, average=True)

    def free(self) -> None:
        """Nothing is kept; here so that it can stand in for the others."""
        self.is_free = True
