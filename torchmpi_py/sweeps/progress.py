"""The progress bar of a sweep: on standard error of the chief, by a thread that looks into the ledger."""

from __future__ import annotations

import os
import threading

from torchmpi_py.sweeps.ledger import Ledger
from torchmpi_py.sweeps.outcome import FAILED

_LOOK_SECONDS = 0.5


class Progress:
    """Within ``with`` a bar shows how many experiments have ended; none without tqdm, or if not ``shown``."""

    def __init__(self, ledger: Ledger, num_before: int, *, shown: bool) -> None:
        self._ledger, self._num_before = ledger, num_before
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="torchmpi_py experiments", daemon=True)
        self._shown = shown

    def __enter__(self) -> Progress:
        if self._shown:
            self._stream = os.fdopen(os.dup(2), "w")  # standard error itself is a log during an experiment
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._shown:
            self._thread.join()
            self._stream.close()

    def _show(self) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            return
        total = len(self._ledger.configurations)
        with tqdm(total=total, initial=self._num_before, desc="experiments", file=self._stream) as bar:
            is_last = False
            while not is_last:
                is_last = self._is_over.wait(_LOOK_SECONDS)
                if self._ledger.num_ended() != bar.n:
                    ended = self._ledger.results()
                    bar.set_postfix(failed=sum(row.state == FAILED for row in ended), refresh=False)
                    bar.update(len(ended) - bar.n)
