"""Shorten a job's errors by removing mpirun's notices and the package's frames when the message is enough.

Nothing is removed with ``TORCHMPI_ERRORS=full``.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

_RULE = b"-" * 74 + b"\n"  # line before and after a notice of Open MPI and its mpirun
_NEEDLESS = (b"MPI_ABORT was invoked on rank", b"prterun has exited due to process rank")
_MOST_BYTES = 4096  # size limit of a notice
_SEEN_BYTES = 1 << 16
_HOLD_SECONDS = 0.3  # limit for a notice to become complete
_PACKAGE = str(Path(__file__).resolve().parents[1])
# Frames of the package are removed from these errors and from the package's own error classes. Any other error may be
# a defect of the package, so its frames are shown.
_OF_BAD_INPUT = ("ValueError", "TypeError")


def are_full(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user has chosen errors with all frames and notices."""
    return environment.get("TORCHMPI_ERRORS") == "full"


def printable(text: str) -> str:
    """Return the text with control characters, except tab and line feed, as escapes.

    A path, a host name or a program's label may contain control characters, which a terminal would execute.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


class NoticeFilter:
    """Filter for mpirun's stderr, which removes notices of an abort if a rank has reported the cause of the abort.

    Other output passes without delay. Only the beginning of a notice is held back until the notice is complete.
    ``is_explained()`` returns whether a rank has reported the cause of the abort.
    """

    def __init__(self, is_explained: Callable[[], bool]) -> None:
        self._is_explained = is_explained
        self._held, self._since = b"", 0.0
        self._is_line_start = True
        self.seen = b""  # last part of all input so far

    def feed(self, data: bytes) -> bytes:
        """Add ``data`` to the input, and return the output that may be shown now."""
        self.seen = (self.seen + data)[-_SEEN_BYTES:]
        if are_full():
            return data
        data, shown = self._held + data, b""
        was_held, self._held = bool(self._held), b""
        while data:
            if self._is_line_start and (data.startswith(_RULE) or _RULE.startswith(data)):
                end = data.find(b"\n" + _RULE, len(_RULE) - 1) + 1
                if end == 0 and len(data) < _MOST_BYTES:
                    self._held, self._since = data, self._since if was_held else time.monotonic()
                    break
                piece = data[: (end or 0) + len(_RULE)]
                is_needless = piece[len(_RULE) :].startswith(_NEEDLESS) and self._is_explained()
                shown += b"" if is_needless else piece
            else:
                piece = data[: data.find(b"\n") + 1] or data
                shown += piece
                self._is_line_start = piece.endswith(b"\n")
            data = data[len(piece) :]
        return shown

    def overdue(self, *, at_end: bool = False) -> bytes:
        """Return the beginning of a notice that was held back but did not become complete in time, or b"".

        With ``at_end`` the input has ended, so the notice will never be complete, and the time does not matter.
        """
        if not self._held or (time.monotonic() - self._since < _HOLD_SECONDS and not at_end):
            return b""
        notice, self._held = self._held, b""
        self._is_line_start = notice.endswith(b"\n")
        return notice


def traceback_text(error: BaseException) -> str:
    """Return the traceback of the error, without this package's frames if the package rejects a caller's input."""
    trace = traceback.TracebackException.from_exception(error)
    if not are_full():
        each: traceback.TracebackException | None = trace
        raised: BaseException | None = error
        while each is not None and raised is not None:
            _trim(each, type(raised))
            is_cause = each.__cause__ is not None
            each = each.__cause__ if is_cause else each.__context__
            raised = raised.__cause__ if is_cause else raised.__context__
    return "".join(trace.format())


def _trim(trace: traceback.TracebackException, kind: type[BaseException]) -> None:
    if not (kind.__name__ in _OF_BAD_INPUT or kind.__module__ == "torchmpi_py.errors"):
        return
    outside = [n for n, frame in enumerate(trace.stack, 1) if not frame.filename.startswith(_PACKAGE + os.sep)]
    if outside:
        del trace.stack[outside[-1] :]


@contextlib.contextmanager
def said_once(folder: str, text: str, rank: int) -> Iterator[int | None]:
    """Yield the rank of this host that has printed this text; None if this rank is the first and must print it.

    The other ranks wait until the first rank has printed the text. If the first rank is killed before that, the next
    rank becomes the first. If ``folder``, the job's folder, is "", or if errors are printed in full, yield None.
    """
    mark = os.path.join(folder, f"said-{zlib.crc32(text.encode(errors='replace'))}")
    with _locked(mark) if folder and not are_full() else io.BytesIO() as file:
        first = file.read()
        yield int(first) if first else None
        if not first:
            file.write(b"%d" % rank)


def _locked(path: str) -> IO[bytes]:
    """Open the file, wait for an exclusive lock on it, and return it; an in-memory file if it cannot be opened."""
    with contextlib.suppress(OSError):
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)  # The kernel releases the lock when the process ends.
        return file
    return io.BytesIO()
