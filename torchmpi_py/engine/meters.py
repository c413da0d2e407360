"""Running means over samples, on this rank and over all ranks (torchnet's meters).

A meter adds up sums and numbers of samples, not batch means, so that ``reduced()`` is exact when the ranks hold
different numbers of samples, or none.
"""

from __future__ import annotations

import torch

from torchmpi_py.collectives import verbs
from torchmpi_py.runtime import process


class Average:
    """Mean of a quantity over samples. NaN while there is none."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.total = 0.0
        self.num_samples = 0

    def add(self, value: torch.Tensor | float, num_samples: int = 1) -> None:
        """``value`` is a mean over ``num_samples`` samples; with 0 of them it does not count, whatever it is.

        A value on a GPU is waited for.
        """
        if num_samples > 0:
            self.total += float(value.detach() if isinstance(value, torch.Tensor) else value) * num_samples
            self.num_samples += num_samples

    @property
    def value(self) -> float:
        """The mean over this rank's samples."""
        return self.total / self.num_samples if self.num_samples else float("nan")

    def state_dict(self) -> dict[str, float]:
        """This rank's sum and number of samples, for a checkpoint."""
        return {"total": self.total, "num_samples": self.num_samples}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Take what ``state_dict`` gave."""
        self.total, self.num_samples = state_dict["total"], int(state_dict["num_samples"])

    def reduced(self) -> float:
        """The mean over the samples of all ranks, the same number on each; every rank must call it.

        When the package is not started there is one rank, this one.
        """
        if not process.is_started():
            return self.value
        sums = torch.tensor([self.total, self.num_samples], dtype=torch.float64, device="cpu")
        total, num_samples = verbs.allreduce(sums).tolist()
        return total / num_samples if num_samples else float("nan")


class Accuracy:
    """Share of targets that are the class of the highest score (top 1)."""

    def __init__(self) -> None:
        self._hits = Average()

    def reset(self) -> None:
        """Forget everything."""
        self._hits.reset()

    def add(self, output: torch.Tensor, target: torch.Tensor, num_samples: int | None = None) -> None:
        """``output``: scores (N, classes, ...); ``target``: class indices (N, ...); the first ``num_samples`` count.

        Raises ValueError when the shapes do not fit each other.
        """
        if not shapes_fit(output, target):
            raise ValueError(
                f"output of shape {tuple(output.shape)} and target of shape {tuple(target.shape)}: "
                "give scores (N, classes, ...) and class indices (N, ...)"
            )
        num_samples = len(target) if num_samples is None else num_samples
        hits = (output.argmax(1) == target)[:num_samples]
        self._hits.add(hits.double().mean(), num_samples)

    @property
    def value(self) -> float:
        """The share on this rank, from 0 to 1; NaN while there is no sample."""
        return self._hits.value

    def state_dict(self) -> dict[str, float]:
        """As ``Average.state_dict``."""
        return self._hits.state_dict()

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """As ``Average.load_state_dict``."""
        self._hits.load_state_dict(state_dict)

    def reduced(self) -> float:
        """The share over all ranks, as ``Average.reduced``."""
        return self._hits.reduced()


def shapes_fit(output: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether these are shapes of scores (N, classes, ...) and of class indices (N, ...)."""
    return output.ndim >= 2 and output.shape[:1] + output.shape[2:] == target.shape
