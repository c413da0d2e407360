"""Losses in TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from torchmpi_py.engine import outcomes
from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.state import State


class TensorBoard(Extension):
    """Write rank 0's loss of each step into a folder for TensorBoard; on other ranks do nothing.

    Under ``torchmpirun --groups`` rank 0 of the first group writes, as ``mpi.is_chief`` says.

    Args:
        folder: Where torch's ``SummaryWriter`` writes. ``writer`` is that object from ``on_start`` on, on rank 0.

    Raises ImportError on rank 0, when training begins, if tensorboard is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder
        self.writer: Any = None

    def on_start(self, state: State) -> None:
        """Open the folder, on rank 0."""
        if self.writer is None and outcomes.is_chief():
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(os.fspath(self.folder))

    def on_update(self, state: State) -> None:
        """Write the loss, if this rank has samples in the step."""
        if self.writer is not None and state.sample is not None:
            self.writer.add_scalar("loss", state.loss.item(), state.t)

    def on_end(self, state: State) -> None:
        """Bring what was written to the disk."""
        if self.writer is not None:
            self.writer.flush()
