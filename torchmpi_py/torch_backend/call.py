"""A call of torch.distributed.

It is one or more operations of the package, one after another, and what concludes them; *under way* from when it is
queued until that is done.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from torchmpi_py.collectives.operation import Operation
from torchmpi_py.handles import Handle


class Call:
    """Operations that are carried out one after another; then ``conclude``, and ``results`` are there."""

    def __init__(
        self,
        operations: Sequence[Operation[Any]],
        results: list[Tensor],
        conclude: Callable[[], object] | None = None,
    ) -> None:
        self.operations = operations
        self.results = results
        self._conclusions = [conclude] if conclude is not None else []
        self.device = operations[0].device if operations else None
        self._lock = threading.Lock()
        self._is_over = False
        self._when_over: Callable[[], None] | None = None

    @property
    def label(self) -> object:
        """What to call it."""
        return self.operations[0].label if self.operations else "a call of torch.distributed"

    @property
    def noted(self) -> Any:
        """What the first operation was noted as."""
        return self.operations[0].noted if self.operations else None

    @property
    def tensors(self) -> Iterable[Tensor]:
        """All that its operations read and write."""
        return itertools.chain(self.results, *(operation.tensors for operation in self.operations))

    def run(self, *, in_background: bool = False) -> list[Tensor]:
        """Carry it out; on the background channel, if it comes from a callback."""
        for operation in self.operations:
            operation.run(in_background)
        for conclude in self._conclusions:
            conclude()
        return self.results

    def afterwards(self, step: Callable[[], object]) -> None:
        """Conclude it with ``step`` too."""
        self._conclusions.append(step)

    def is_over(self) -> None:
        """It is complete, or has failed: do what was to be done then."""
        with self._lock:
            self._is_over = True
        if self._when_over is not None:
            self._when_over()

    def when_over(self, step: Callable[[], None]) -> None:
        """Run ``step`` when the call is over, once, or now."""
        with self._lock:
            if not self._is_over:
                self._when_over = step
                return
        step()

    def finish(self) -> list[Tensor]:
        """Nothing of it is posted."""
        return self.results

    def explain(self, error: Exception) -> Exception:
        """Its operations have done so."""
        return error

    def who_is_late(self) -> str:
        """Which ranks have not come to its first operation."""
        return self.operations[0].who_is_late() if self.operations else ""


class Carrier(Protocol):
    """Who carries out a call that is under way."""

    def when_over(self, step: Callable[[], None]) -> None:
        """Run ``step`` when it is over, once, or now."""

    def when_late(self) -> None:
        """Somebody has stopped waiting for it."""

    def expect(self, handle: Handle[Any]) -> None:
        """A future of the call was asked for: it counts as waited for until it is over, given up, or abandoned."""

    def before_wait(self, handle: Handle[Any]) -> None:
        """Before this thread waits for the handle: carry the call out, if that is this thread's work."""

    def before_future(self, handle: Handle[Any]) -> None:
        """Before it waits for what is chained to the call: carry that out, too."""
