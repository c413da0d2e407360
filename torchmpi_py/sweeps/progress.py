"""The progress of a sweep: ``results.csv``, and a bar on standard error of rank 0.

A thread polls the ledger, because the progress includes the experiments of all groups, which share only files.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from torchmpi_py.sweeps.ledger import Ledger
from torchmpi_py.sweeps.outcome import FAILED, Results

_LOOK_SECONDS = 0.5


class Progress:
    """A context manager that keeps ``results.csv`` up to date. With ``bar``, it also shows a progress bar (by tqdm)."""

    def __init__(self, ledger: Ledger, num_before: int, *, bar: bool) -> None:
        self._ledger, self._num_before, self._bar = ledger, num_before, bar
        self._is_over, self._is_written = threading.Event(), False
        self._thread = threading.Thread(target=self._follow, name="torchmpi_py experiments", daemon=True)

    def __enter__(self) -> Progress:
        # Duplicate standard error, because an experiment redirects it to its log.
        self._stream = os.fdopen(os.dup(2), "w")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._stream.close()
        # If the thread could not write the file, try again, and let an error propagate this time.
        if not self._is_written:
            self._write(Results())

    def _follow(self) -> None:
        ended, bar = Results(), self._made_bar()
        while True:
            is_last = self._is_over.wait(_LOOK_SECONDS)
            with contextlib.suppress(OSError):  # The disk may be full for a short time.
                if is_last or self._ledger.num_ended() != len(ended):
                    ended, self._is_written = self._write(ended), is_last
                    if bar is not None:
                        bar.set_postfix(failed=sum(row.state == FAILED for row in ended), refresh=False)
                        bar.update(len(ended) - bar.n)
            if is_last:
                break
        if bar is not None:
            bar.close()

    def _write(self, former: Results) -> Results:
        ended = self._ledger.results(former)
        ended.to_csv(self._ledger.folder / "results.csv")
        return ended

    def _made_bar(self) -> Any:
        """Return a progress bar, or None if ``bar`` is False or tqdm is not installed."""
        if not self._bar:
            return None
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        total = len(self._ledger.configurations)
        return tqdm(total=total, initial=self._num_before, desc="experiments", file=self._stream)
