"""Running means over samples, on this rank and over all ranks (torchnet's meters).

A meter stores a sum and a number of samples, not the means of batches. So ``reduced()`` is exact even if the ranks have
different numbers of samples, or no samples.
"""

from __future__ import annotations

from typing import Any

import torch

from torchmpi_py.collectives import verbs
from torchmpi_py.runtime import process


class _Mean:
    """Base class of running means over samples."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all samples."""
        self.total = 0.0
        self.num_samples = 0

    def _add(self, mean: torch.Tensor | float, num_samples: int) -> None:
        if num_samples > 0:
            self.total += float(mean.detach() if isinstance(mean, torch.Tensor) else mean) * num_samples
            self.num_samples += num_samples

    @property
    def value(self) -> float:
        """The mean over this rank's samples; NaN without samples."""
        return self.total / self.num_samples if self.num_samples else float("nan")

    def state_dict(self) -> dict[str, float]:
        """Return this rank's sum and number of samples, for a checkpoint."""
        return {"total": self.total, "num_samples": self.num_samples}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Load a state that ``state_dict`` has returned.

        Args:
            state_dict (dict): state to load.
        """
        self.total, self.num_samples = state_dict["total"], int(state_dict["num_samples"])

    def reduced(self) -> float:
        """Return the mean over the samples of all ranks, equal on every rank. Every rank must make this call.

        Without ``mpi.start()``, return the mean over this rank's samples.
        """
        if not process.is_started():
            return self.value
        sums = torch.tensor([self.total, self.num_samples], dtype=torch.float64, device="cpu")
        total, num_samples = verbs.allreduce(sums).tolist()
        return total / num_samples if num_samples else float("nan")


class Average(_Mean):
    """Mean of a quantity over samples; NaN without samples.

    Examples:
        >>> loss = mpi.engine.Average()
        >>> loss.add(2.0, num_samples=3)
        >>> loss.add(4.0)
        >>> loss.value, loss.reduced()
        (2.5, 2.5)
    """

    def add(self, value: torch.Tensor | float, num_samples: int = 1) -> None:
        """Add the mean of ``num_samples`` samples. If the mean is on a GPU, the host waits for the GPU.

        Args:
            value (Tensor or float): mean over the samples, a scalar.
            num_samples (int): number of samples; default 1. With 0, ``value`` is ignored.
        """
        self._add(value, num_samples)


class Accuracy(_Mean):
    """Fraction of samples whose target is the class with the highest score (top 1), from 0 to 1; NaN without samples.

    Examples:
        >>> accuracy = mpi.engine.Accuracy()
        >>> accuracy.add(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        >>> accuracy.value
        0.5
    """

    def add(self, output: torch.Tensor, target: torch.Tensor, num_samples: int | None = None) -> None:
        """Add the samples of a batch.

        Args:
            output (Tensor): scores of shape (N, classes, ...).
            target (Tensor): class indices of shape (N, ...).
            num_samples (int): number of samples to count, from the first one; default None, all.

        Raises:
            ValueError: ``output`` and ``target`` are not scores and class indices of matching shapes.
        """
        if not are_scores(output, target):
            raise ValueError(
                "Accuracy.add: pass scores (N, classes, ...) and integer class indices (N, ...); found output of shape "
                f"{tuple(output.shape)} and {target.dtype} target of shape {tuple(target.shape)}"
            )
        num_samples = len(target) if num_samples is None else num_samples
        hits = (output.argmax(1) == target)[:num_samples]
        self._add(hits.double().mean(), num_samples)


def are_scores(output: Any, target: Any) -> bool:
    """Return whether the arguments are scores (N, classes, ...) and integer class indices (N, ...)."""
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)) or output.ndim < 2:
        return False
    is_class = not (target.is_floating_point() or target.is_complex())
    return is_class and output.shape[:1] + output.shape[2:] == target.shape
