"""Collect the stacks of a node's ranks: one rank requests all stacks, and each rank's watchdog writes to the board."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

from torchmpi_py.core.status_board import TEXT_GIVEN, TEXT_WANTED, Board
from torchmpi_py.watch import reports

_GIVEN_WITHIN_SECONDS = 1.5
_FRAMES = 8
_MOST_OF_AN_ERROR = 500  # characters
_HANDLES = "is handling "  # start of an exception's line in a rank's text
_OWN_THREADS = ("torchmpi_py-watchdog", "torchmpi_py-nodes", "torchmpi_py-building")
_LAUNCHER = re.compile(r'\s*File "(.*/launch/wrap\.py|<frozen runpy>|.*/runpy\.py)"')  # frames outside the program
_giving = threading.Lock()  # The watchdog and the thread of runtime/building.py may both write.


def gather(board: Board, is_over: Callable[[], bool], seconds: float = _GIVEN_WITHIN_SECONDS) -> list[int]:
    """Request the stacks of all ranks of the node, and return the local ranks that have not written their stacks.

    Wait up to ``seconds`` for the stacks. Return earlier if ``is_over()`` is true, or if every rank without a stack has
    ended or cannot continue.
    """
    request_ns = time.monotonic_ns()
    for index in board.indices:
        board.put(TEXT_WANTED, request_ns, index)
    until = time.monotonic() + seconds
    while True:
        give(board)
        silent = [index for index in board.indices if board.get(TEXT_GIVEN, index) < request_ns]
        if time.monotonic() > until or is_over() or all(reports.trouble(board, index) for index in silent):
            return silent
        time.sleep(0.02)


def give(board: Board) -> None:
    """Write the stacks of this process to the board, if a rank has requested them since the last call."""
    with _giving:
        request_ns = board.get(TEXT_WANTED)
        if request_ns != board.get(TEXT_GIVEN):
            board.write_text(text())
            board.put(TEXT_GIVEN, request_ns)


def text() -> str:
    """Return the innermost frames of this process's threads, the main thread first; omit the package's own threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, handled = threading.main_thread().ident, sys._current_exceptions()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "".join(
        f"{names.get(ident, 'thread')}:\n{_handled(handled.get(ident))}"
        f"{''.join([each for each in traceback.format_stack(frame) if not _LAUNCHER.match(each)][-_FRAMES:])}"
        for ident, frame in frames
        if names.get(ident) not in _OWN_THREADS
    )


def _handled(entry: Any) -> str:
    """Return a line about the exception that a thread handles (also in a ``finally`` block), or "" if there is none."""
    error = entry[1] if isinstance(entry, tuple) else entry  # Python 3.11 and older have tuples here.
    if error is None:
        return ""
    text = " ".join("".join(traceback.format_exception_only(error)).split())[:_MOST_OF_AN_ERROR]
    places = [f", raised at {each.filename}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)[-1:]]
    return f"{_HANDLES}{text}{''.join(places)}\n"


def exceptions(board: Board, silent: Collection[int]) -> str:
    """Return the exceptions that the ranks' threads handle, one per line, for all ranks that are not ``silent``."""
    return "".join(
        f"torchmpi_py: {reports.rank_name(board, index)} {line}\n"
        for index in board.indices
        if index not in silent
        for line in board.read_text(index).splitlines()
        if line.startswith(_HANDLES)
    )
