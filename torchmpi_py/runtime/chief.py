"""The rank that writes logs and files for all ranks. The name ``is_chief`` is from TensorFlow."""

from __future__ import annotations

import os
from typing import Any

from torchmpi_py.core import communicators
from torchmpi_py.launch import group_of_ranks
from torchmpi_py.runtime import process


def is_in_experiment() -> bool:
    """Return whether this process runs an experiment of a sweep, in which its group of ranks is the whole world."""
    return communicators.stack().outer is not None


def is_chief() -> bool:
    """Return whether this rank is rank 0 of the current level, which should write logs, summaries and files.

    In an experiment (``mpi.experiments``) the result is True on rank 0 of the group. Outside of experiments, under
    ``torchmpirun --groups``, it is True only on rank 0 of the first group. Other ranks need not make this call.

    Returns:
        True or False.

    Raises:
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> if mpi.is_chief():
        ...     path = "model.pt"  # torch.save(model.state_dict(), path)
        >>> mpi.is_chief() == (mpi.rank() == 0)
        True
    """
    group = group_of_ranks.group_in(os.environ)
    return process.rank() == 0 and (is_in_experiment() or group is None or group.index == 0)


def summary_writer(log_dir: str | None = None, **options: Any) -> Any:
    """Return TensorBoard's writer on rank 0, and on other ranks an object whose methods do nothing.

    Other ranks need not make this call.

    Args:
        log_dir (str): folder of the summaries; default None, TensorBoard's default.
        options (Any): further arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Returns:
        A ``SummaryWriter``, or an object that accepts the same calls.

    Raises:
        ImportError: TensorBoard is not installed; raised on every rank.
        NotStarted: ``mpi.start()`` was not called.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir, **options) if is_chief() else _SilentWriter()


class _SilentWriter:
    """A substitute for a summary writer on ranks that write nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None

    def __enter__(self) -> _SilentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, because there is nothing to close."""
