"""Where the threads of a node's ranks stand: one rank asks for stacks on the board, each watchdog writes its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torchmpi_py.core.status_board import TEXT_GIVEN, TEXT_WANTED, Board
from torchmpi_py.watch import reports

_GIVEN_WITHIN_SECONDS = 1.5
_giving = threading.Lock()  # the watchdog's thread gives, and that of runtime/building.py


def gather(board: Board, is_over: Callable[[], bool]) -> list[int]:
    """Have all ranks of the node write their stacks; return those that have not within some seconds."""
    asked = time.monotonic_ns()
    for index in board.indices:
        board.put(TEXT_WANTED, asked, index)
    until = time.monotonic() + _GIVEN_WITHIN_SECONDS
    while True:
        give(board)
        silent = [index for index in board.indices if board.get(TEXT_GIVEN, index) < asked]
        if time.monotonic() > until or is_over() or all(reports.trouble(board, index) for index in silent):
            return silent
        time.sleep(0.02)


def give(board: Board) -> None:
    """Write the stacks of this process to the board, if another rank has asked since the last time."""
    with _giving:
        asked = board.get(TEXT_WANTED)
        if asked != board.get(TEXT_GIVEN):
            board.write_text(reports.stacks())
            board.put(TEXT_GIVEN, asked)
