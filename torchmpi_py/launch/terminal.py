"""What torchmpirun says itself, and what it shows of the ranks' logs, for as long as somebody reads it."""

import os
import sys
from pathlib import Path
from typing import TextIO


def say(text: str) -> None:
    """To the terminal, if it is still there: the job must be ended in order all the same."""
    try:
        print(f"torchmpirun: {text}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        _silence(sys.stderr)


class Tail:
    """Copies to the terminal what rank 0 adds to its log, until nobody reads it any more.

    The first attempt to run a job begins a new log. The others go on in it.
    """

    def __init__(self, log_dir: Path | None, attempt: int) -> None:
        self._log = None if log_dir is None else log_dir / "rank-0.log"
        self._shown_bytes = 0
        if self._log is not None and attempt == 0:
            self._log.unlink(missing_ok=True)
        elif self._log is not None and self._log.exists():
            self._shown_bytes = self._log.stat().st_size

    def show(self) -> None:
        """Show what has come since."""
        if self._log is None or sys.stdout is None or not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._shown_bytes)
            added = log.read()
        if added:
            self._shown_bytes += len(added)
            try:
                sys.stdout.buffer.write(added)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """Nobody reads it any more: send it nowhere, also what Python still wants to write when it exits."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
