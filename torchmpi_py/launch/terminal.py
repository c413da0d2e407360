"""The standard streams of torchmpirun: messages of torchmpirun and mpirun, rank 0's log, and the input.

The reader of the output may pause, for example in ``| less``, after Ctrl-S, or as a stopped process. A write then
blocks, so only threads write. The loop that watches the job continues, and handles signals, deaths and the time limit.
No output is lost during the pause, because the log is on disk, and torchmpirun's messages are kept in memory.
``finish`` waits for the reader at the end.

Rank 0 gets the standard input (`handed_input`), unless the input is a terminal. mpirun runs in a separate session, in
which Open MPI would never read from the terminal. MPICH would read keys that are meant for the shell when the job is in
the background. If the input is a file, each attempt to run a job reads it from the same position. A pipe can be read
only once, so later attempts get an empty input.
"""

import atexit
import codecs
import contextlib
import errno
import os
import queue
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

from torchmpi_py import trusted_files
from torchmpi_py.launch.notices import NoticeFilter, printable

ENDED_SECONDS = 1.0  # After the end of the job, torchmpirun exits if the reader pauses for this time.
_SOON_SECONDS = 0.2  # Time that torchmpirun waits for the reader, to keep its lines in order with other output.
_LOOK_SECONDS = 0.05  # Time between two searches for more output.
_READ_BYTES = 1 << 16
_PIECE_BYTES = 4096  # Size of a single write. Each write that returns counts as progress of the reader.
_STDOUT, _STDERR = 1, 2


def say(text: str) -> None:
    """Write a line to stderr. Do nothing if stderr is closed, so that the job still ends normally."""
    if sys.stderr is not None:
        _speech.add(f"torchmpirun: {printable(text)}\n")
        _speech.wait(_SOON_SECONDS)


def relay(notices: NoticeFilter) -> int | None:
    """Return a descriptor for mpirun's stderr, or None if torchmpirun has no stderr.

    The caller must close the descriptor after the start of mpirun. The output is copied to torchmpirun's stderr without
    notices of an abort whose cause a rank has reported (``NoticeFilter``), and without NUL bytes. Open MPI ends a
    notice with a NUL byte, which makes ``grep`` treat the output as binary.
    """
    return None if sys.stderr is None else _speech.relay(notices)


def catch_up() -> None:
    """Give the reader a short time to read the last output of an mpirun that has ended."""
    _speech.wait(_SOON_SECONDS)


def has_input() -> bool:
    """Return whether the standard input is for rank 0: it is open, and neither a terminal nor /dev/null."""
    try:
        return not stat.S_ISCHR(os.fstat(0).st_mode)
    except OSError:
        return False


def starter_input() -> int | None:
    """Return mpirun's ``stdin`` for subprocess.Popen: /dev/null if the input is a terminal, else the same input."""
    return subprocess.DEVNULL if os.isatty(0) else None


def input_position() -> int | None:
    """Return the offset in the standard input if it is a file, else None."""
    try:
        return os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(os.fstat(0).st_mode) else None
    except OSError:
        return None


def rewind_input(begin: int | None) -> None:
    """Rewind an input file to position ``begin`` before another attempt, or replace a pipe by an empty input."""
    if begin is not None:
        os.lseek(0, begin, os.SEEK_SET)
    elif has_input():
        say("standard input is a pipe, which only the first attempt can read; to repeat it, redirect a file (< FILE)")
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)


def finish(tail: "Tail", is_over: Callable[[], bool]) -> None:
    """Wait until the reader has read all output.

    If ``is_over()`` becomes true (a signal or the time limit ends the job), wait only while the reader continues to
    read.
    """
    for outlet in (tail, _speech):
        if outlet.wait(inf, is_over) or outlet.wait(ENDED_SECONDS):
            continue
        if outlet is tail:
            say(f"not all of rank 0's output was shown; the complete output is in {tail.log}")


class _Outlet:
    """A thread that writes the output of ``_next_output`` to a descriptor until the reader closes the other end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._asked = self._answered = self._num_written = 0
        self._is_read = True
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it was started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            atexit.register(self.wait, ENDED_SECONDS)

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all current output is written; return whether it was written.

        Stop waiting if the reader reads nothing for ``seconds``, or if ``is_over()`` becomes true.
        """
        if self._thread is None:
            return True
        self._asked += 1
        request, num_written, until = self._asked, self._num_written, time.monotonic() + seconds
        self._news.set()
        while self._answered < request and time.monotonic() < until and not is_over():
            if self._num_written > num_written:
                num_written, until = self._num_written, time.monotonic() + seconds
            time.sleep(0.005)
        return self._answered >= request

    def _next_output(self) -> bytes:
        """Return the output that must be written next; empty if there is no output now."""
        raise NotImplementedError

    def _wait_for_more(self) -> None:
        """Wait until more output may be available."""
        self._news.wait(_LOOK_SECONDS)
        self._news.clear()

    def _run(self) -> None:
        """Write all output in the thread, and release the callers of ``wait`` whenever everything is written."""
        while True:
            request = self._asked
            output = self._next_output()
            for begin in range(0, len(output), _PIECE_BYTES):
                self._write(output[begin : begin + _PIECE_BYTES])
            if not output:
                self._answered = request
                self._wait_for_more()

    def _write(self, piece: bytes) -> None:
        """Write a piece of output to the descriptor until the reader closes the other end.

        Do not use a stream, because Python cannot exit while a thread holds the lock of a stream.
        """
        while piece and self._is_read:
            try:
                piece = piece[os.write(self._descriptor, piece) :]
                self._num_written += 1
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError as error:
                self._is_read = False
                self._explain(error)

    def _explain(self, error: OSError) -> None:
        """Report a write error to the user; by default, do nothing."""


class _Speech(_Outlet):
    """The messages of torchmpirun and mpirun."""

    def __init__(self) -> None:
        super().__init__(_STDERR)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._pipes: dict[int, NoticeFilter] = {}

    def add(self, line: str) -> None:
        """Queue a line for writing."""
        self._lines.put(line)
        self.start()

    def relay(self, notices: NoticeFilter) -> int:
        """Create a pipe whose content is filtered by ``notices`` and written to stderr; return its writing end."""
        pipe, end = os.pipe()
        os.set_blocking(pipe, False)
        self._pipes[pipe] = notices
        self.start()
        self._news.set()
        return end

    def _next_output(self) -> bytes:
        for pipe, notices in list(self._pipes.items()):
            with contextlib.suppress(BlockingIOError):
                data = os.read(pipe, _READ_BYTES)
                if data:
                    return notices.feed(data.replace(b"\0", b"")) or self._next_output()
                os.close(pipe)
                del self._pipes[pipe]
                if notice := notices.overdue(at_end=True):
                    return notice
            if notice := notices.overdue():
                return notice
        return b"" if self._lines.empty() else self._lines.get().encode(errors="backslashreplace")

    def _wait_for_more(self) -> None:
        if self._pipes:
            select.select(self._pipes, [], [], _LOOK_SECONDS)
        else:
            super()._wait_for_more()


class Tail(_Outlet):
    """Copier of rank 0's log to the standard output while the log grows, in all attempts.

    Without a log folder nothing is copied. Existing content of the log belongs to an earlier job and is not copied. The
    output is text. NUL bytes are removed, because a log that is truncated while a process writes to it has holes. Bytes
    that are not UTF-8 are replaced.
    """

    def __init__(self, log_dir: Path | None) -> None:
        super().__init__(_STDOUT)
        self.log = None if log_dir is None else log_dir / "rank-0.log"
        self._num_read = 0 if self.log is None or not self.log.exists() else self.log.stat().st_size
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if self.log is not None and sys.stdout is not None:
            self.start()

    def catch_up(self) -> None:
        """Copy the current content of the log, so that later messages appear after it."""
        self.wait(_SOON_SECONDS)

    def _next_output(self) -> bytes:
        assert self.log is not None
        text = ""
        try:
            with open(trusted_files.open_file(self.log, os.O_RDONLY), "rb") as log:
                if os.fstat(log.fileno()).st_size < self._num_read:  # The log was truncated, so its content is new.
                    self._num_read = 0
                log.seek(self._num_read)
                while not text and (added := log.read(_READ_BYTES)):
                    self._num_read += len(added)
                    text = self._decoder.decode(added).replace("\0", "")
        except OSError:  # The log may not exist yet.
            return b""
        return text.encode()

    def _explain(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):
            say(f"cannot write to standard output: {error.strerror}; rank 0's output is in {self.log}")


_speech = _Speech()
