"""An extension that writes losses for TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from torchmpi_py.engine import outcomes
from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.state import State


class TensorBoard(Extension):
    """Write rank 0's loss of each step into a folder for TensorBoard; do nothing on other ranks.

    Under ``torchmpirun --groups``, rank 0 of the first group writes (``mpi.is_chief``).

    Args:
        folder (path): folder of torch's ``SummaryWriter``.

    Attributes:
        writer (SummaryWriter): the writer, which rank 0 creates in ``on_start``; None before ``on_start`` and on other
            ranks.

    Raises:
        ImportError: tensorboard is not installed. ``train`` raises it on rank 0.

    Examples:
        >>> extensions = [mpi.engine.EpochLines(), mpi.engine.TensorBoard("runs/1")]  # for engine.train
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder
        self.writer: Any = None

    def on_start(self, state: State) -> None:
        """Create the writer on rank 0, unless an earlier run has created it.

        Args:
            state (State): state of the run.
        """
        if self.writer is None and outcomes.is_chief():
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(os.fspath(self.folder))

    def on_update(self, state: State) -> None:
        """Write the loss, if this rank has samples in the step.

        Args:
            state (State): state of the run.
        """
        if self.writer is not None and state.sample is not None:
            self.writer.add_scalar("loss", state.loss.item(), state.t)

    def on_end(self, state: State) -> None:
        """Flush the writer.

        Args:
            state (State): state of the run.
        """
        if self.writer is not None:
            self.writer.flush()
