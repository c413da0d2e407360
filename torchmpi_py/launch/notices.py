"""What is left out of a job's errors: notices and frames that repeat what torchmpirun and the message say.

``TORCHMPI_ERRORS=full`` leaves nothing out.
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

_RULE = b"-" * 74 + b"\n"  # before and after a notice of Open MPI and its starter
_NEEDLESS = (b"MPI_ABORT was invoked on rank", b"prterun has exited due to process rank")
_MOST_BYTES = 4096  # of a notice
_SEEN_BYTES = 1 << 16
_HOLD_SECONDS = 0.3  # for the rest of a notice
_PACKAGE = str(Path(__file__).resolve().parents[1])
_OF_BAD_INPUT = ("ValueError", "TypeError")  # and the package's own: what else is raised may be a defect of it


def are_full(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user wants errors with all frames and notices."""
    return environment.get("TORCHMPI_ERRORS") == "full"


def printable(text: str) -> str:
    """The text with control characters, except tab and line feed, as escapes.

    A path, a host's name or a program's label may hold them, and a terminal would obey.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


class NoticeFilter:
    """Leaves out of a starter's stderr what it says of an abort, where a rank or torchmpirun has said why.

    All else passes at once, but for the beginning of a notice, which is held until the notice is complete.
    ``is_explained``: whether a rank of this package has said why it ends the job.
    """

    def __init__(self, is_explained: Callable[[], bool]) -> None:
        self._is_explained = is_explained
        self._held, self._since = b"", 0.0
        self._is_line_start = True
        self.seen = b""  # the last of what was fed

    def feed(self, data: bytes) -> bytes:
        """Output that may be shown, after ``data`` was read."""
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
        """What was held, for no notice has come of it in time, or none can."""
        if not self._held or (time.monotonic() - self._since < _HOLD_SECONDS and not at_end):
            return b""
        held, self._held = self._held, b""
        self._is_line_start = held.endswith(b"\n")
        return held


def traceback_text(error: BaseException) -> str:
    """The traceback, without the frames of this package in which it refuses what its caller gave."""
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
    """The rank of this host that has said just this; None if this rank is the first, which says it in the block.

    The others wait for the first. Where it is killed before it has said it, the next one is the first.
    """
    mark = os.path.join(folder, f"said-{zlib.crc32(text.encode(errors='replace'))}")
    with _locked(mark) if folder and not are_full() else io.BytesIO() as file:
        first = file.read()
        yield int(first) if first else None
        if not first:
            file.write(b"%d" % rank)


def _locked(path: str) -> IO[bytes]:
    """A file that no other process has meanwhile; an empty one in memory where it cannot be written."""
    with contextlib.suppress(OSError):
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)  # which goes with the process
        return file
    return io.BytesIO()
