"""The program of a notebook's rank: an IPython shell that runs the kernel's cells, one after another.

The main thread runs the cells. Another thread listens to the kernel, so that the kernel can interrupt a cell, or
request the line that a cell has reached. The package starts with ``at_deadline="raise"``. With this setting no
collective blocks inside MPI, where Python could not react to an interrupt.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from IPython.core import page
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

import torchmpi_py as mpi
from torchmpi_py.core import communicators, config, journal, sequences, status_board
from torchmpi_py.notebook.rank_job import VARIABLE, connect

_CELL = "Cell In["  # start of a cell's file name in tracebacks


class KernelLink:
    """A connection to the kernel, on which several threads can send messages (kind, ...) without mixing them."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self.process_id = os.getpid()
        self._lock = threading.RLock()  # A signal handler may print before _sender is set.
        self._sender: int | None = None  # thread that has the lock
        self._printed_meanwhile: deque[bytes] = deque()  # messages of destructors that run during a send

    def send(self, kind: str, *content: object) -> None:
        """Send a message, unless the kernel has ended. If this thread is already in ``send``, queue the message."""
        # Pickle outside the lock, because pickling may run the user's code, which may print.
        message = pickle.dumps((kind, *content))
        if self._sender == threading.get_ident():
            self._printed_meanwhile.append(message)
            return
        try:
            # Block interrupts, because the kernel could not read anything after an incomplete message.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            with self._lock:
                self._send_with(message)
        except OSError:
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def _send_with(self, message: bytes) -> None:
        """Send a message, and then the messages of destructors that run during the send."""
        self._sender = threading.get_ident()
        try:
            self.connection.send_bytes(message)
            while self._printed_meanwhile:
                self.connection.send_bytes(self._printed_meanwhile.popleft())
        finally:
            self._sender = None


class RankStream(io.TextIOBase):
    """The ``sys.stdout`` or ``sys.stderr`` of a rank, which sends text to the kernel.

    The output of C libraries and of child processes goes to the launcher instead.
    """

    encoding = "utf-8"

    def __init__(self, link: KernelLink, name: str, descriptor: int) -> None:
        self._link, self._name, self._descriptor = link, name, descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        if os.getpid() != self._link.process_id:
            os.write(self._descriptor, text.encode(errors="backslashreplace"))
        elif text:
            self._link.send("text", self._name, text)
        return len(text)


class ValueHook(DisplayHook):
    """A display hook that sends the value of a cell's last expression, in all of IPython's formats."""

    def write_output_prompt(self) -> None:
        """Do nothing, because a rank shows no prompt."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        self.shell.link.send("shown", format_dict, md_dict or {}, {})


class RichPublisher(DisplayPublisher):
    """A publisher that sends the arguments of ``display``, including figures of matplotlib."""

    def publish(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, *_: Any, **options: Any) -> None:
        passed_on = {name: options[name] for name in ("transient", "update") if options.get(name)}
        self.shell.link.send("shown", data, metadata or {}, passed_on)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.link.send("cleared", wait)


class RankShell(InteractiveShell):
    """An IPython shell without a terminal or history, which sends its errors to the kernel."""

    link: KernelLink

    def init_history(self) -> None:
        self.history_manager = HistoryManager(shell=self, parent=self, enabled=False)

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: list[str]) -> None:
        own = Path(__file__).name  # Omit the frame of the signal handler.
        self.link.send("error", etype.__name__, str(evalue), [frame for frame in stb if own not in frame])


class RankProgram:
    """The work of a rank between ``mpi.start()`` and the end of the kernel."""

    def __init__(self, link: KernelLink) -> None:
        self._link = link
        self._tasks: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._is_running = self._is_interrupted = False
        self._main_thread = threading.get_ident()
        self._shell = RankShell.instance(
            user_ns={"mpi": mpi, "torch": torch}, displayhook_class=ValueHook, display_pub_class=RichPublisher
        )
        self._shell.link = link
        self._shell.compile.get_code_name = lambda raw, code, number: (
            f"{_CELL}{number}]"
        )  # Reports then contain the number of the cell, not a hash.
        self._shell.set_hook("show_in_pager", page.as_hook(page.display_page), 0)  # Show help (`?`) below the cell.
        signal.signal(signal.SIGINT, self._hear_interrupt)
        threading.Thread(target=self._listen, daemon=True).start()

    def serve(self) -> None:
        """Carry out the kernel's tasks until the kernel sends "end", or the connection ends."""
        while (task := self._tasks.get()) != ("end",):
            try:
                self._is_running = not self._is_interrupted  # An interrupt may arrive before the task starts.
                if not self._is_running:
                    raise KeyboardInterrupt
                self._carry_out(*task)
            except BaseException:
                self._is_running = False
                self._shell.showtraceback()
            self._is_running = False
            self._link.send("done", num_called())

    def _carry_out(self, kind: str, *content: Any) -> None:
        if kind == "pull":
            (name,) = content
            if name not in self._shell.user_ns:
                raise NameError(f"name {name!r} is not defined on rank {mpi.rank()}; define it in a %%torchmpi cell")
            self._link.send("pulled", pickle.dumps(self._shell.user_ns[name]))
            return
        self._shell.execution_count, source = content
        self._shell.run_cell(source, store_history=True)

    def _listen(self) -> None:
        """Handle the kernel's messages. This method runs in a thread."""
        try:
            while True:
                message = self._link.connection.recv()
                if message == ("interrupt",):
                    self._is_interrupted = True
                    signal.pthread_kill(self._main_thread, signal.SIGINT)
                elif message == ("where",):
                    self._link.send("where", self._where())
                elif message == ("refuse",):
                    refuse_collectives()
                else:
                    self._is_interrupted = False
                    self._tasks.put(message)
        except (EOFError, OSError):
            self._tasks.put(("end",))

    def _hear_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._is_running:
            raise KeyboardInterrupt

    def _where(self) -> tuple[str, str, object]:
        """Return the call in which the cell waits, the line of the cell, and a measure of progress.

        The call is "" if the cell is in no call, and both texts are "" if no cell runs.
        """
        frame: FrameType | None = sys._current_frames()[self._main_thread]
        while frame is not None and not frame.f_code.co_filename.startswith(_CELL):
            frame = frame.f_back
        if frame is None or not self._is_running:
            return "", "", num_called()
        return open_call(), f"{frame.f_code.co_filename}, line {frame.f_lineno}", num_called()


def open_call() -> str:
    """Return the name of the package's call in which this rank waits, or "" if this rank is in no such call."""
    board = status_board.current
    numbers = () if board is None else journal.under_way(board)
    records = (journal.find_record(board, number) for number in numbers if board is not None)
    return next((record.text.partition(" ")[0] for record in records if record is not None), "")


def num_called() -> dict[tuple[int, str], int]:
    """Return the number of operations that this rank has called, keyed by communicator (generation, ranks)."""
    board = status_board.current
    return {} if board is None else sequences.last_places(board, tuple(board.slots_of))


def refuse_collectives() -> None:
    """Make all later collectives raise an error, because the ranks have called different numbers of collectives."""
    if communicators.is_started():
        stack = communicators.stack()
        for each in (*stack.levels, *stack.others):
            for sequence in (*each.sequences, *(each.outer.sequences if each.outer is not None else ())):
                sequence.is_broken = not sequence.is_alone


def main() -> None:
    """Start the package, connect to the kernel, and run the kernel's cells until the connection ends."""
    sys.path.insert(0, os.getcwd())  # Cells may import modules from the working directory.
    where, _, key = os.environ.pop(VARIABLE).rpartition(":")
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # This shows pyplot's figures.
    tuning = dataclasses.replace(config.from_environment(), at_deadline="raise")
    mpi.start(with_cuda=torch.cuda.is_available(), tuning=tuning)
    link = KernelLink(connect(where, bytes.fromhex(key)))
    link.connection.send((mpi.rank(), mpi.size(), os.getpid(), socket.gethostname()))
    former = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = RankStream(link, "stdout", 1), RankStream(link, "stderr", 2)
    try:
        RankProgram(link).serve()
    finally:
        sys.stdout, sys.stderr = former


if __name__ == "__main__":
    main()
