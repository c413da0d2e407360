"""A bucket whose gradients are compressed on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.nn.compression import Compressor
from torchmpi_py.nn.gradient_reducer import GradientReducer


class CompressedReducer(GradientReducer):
    """Gradients are inserted as usual; a Compressor reduces them within the bucket."""

    has_state = True

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], flat: Tensor, comm: Communicator, compressor: Compressor
    ) -> None:
        super().__init__(parameters, flat, comm)
        self.reads_in_place = False
        self.compressor = compressor

    def launch(self, op: str) -> list[Handle[Any]]:
        self._insert(self.parameters)
        return self.compressor.launch(op)

    def reduce(self, op: str) -> None:
        wait_all(self.launch(op))

    def finish(self, op: str) -> None:
        self.compressor.finish(op)
        super().finish(op)

    def owes(self, parameter: torch.nn.Parameter) -> bool:
        """Error feedback has kept a part of earlier gradients."""
        return self.compressor.has_error_feedback and bool(self._views[parameter].any())

    def restart(self) -> None:
        self.compressor.restart()
