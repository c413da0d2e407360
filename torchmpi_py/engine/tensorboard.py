"""Losses in TensorBoard."""

from __future__ import annotations

import os

from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.state import State
from torchmpi_py.runtime import process


class TensorBoard(Extension):
    """Write rank 0's loss of each step into a folder for TensorBoard; on other ranks do nothing.

    Args:
        folder: Where torch's ``SummaryWriter`` writes. ``writer`` is that object, for values of your own.

    Raises ImportError on rank 0 when tensorboard is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.writer = None
        if not process.is_started() or process.rank() == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(os.fspath(folder))

    def on_update(self, state: State) -> None:
        """Write the loss."""
        if self.writer is not None:
            self.writer.add_scalar("loss", state.loss.item(), state.t)

    def on_end(self, state: State) -> None:
        """Bring what was written to the disk."""
        if self.writer is not None:
            self.writer.flush()
