"""A rank's first wait, until all ranks have started; after the timeout, a report lists the missing ranks.

MPI waits for all ranks when it is initialized. If mpi4py has initialized MPI before, the first exchange of ``start``
waits instead. At this time the ranks share no memory yet. The idea: each rank binds a Unix socket to its own abstract
address. The other ranks of the host connect to that address to find out whether the rank waits. The alternative, a file
per rank, needs a folder that all ranks agree on, and the files remain after a crash. The report cannot show which ranks
of other hosts wait.

MPI is initialized through ctypes, because this lets Python's other threads run during the wait. mpi4py would block
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from torchmpi_py.core.config import Tuning
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.launch import exit_marks, variables
from torchmpi_py.watch import abort, watchdog

_CONNECT_SECONDS = 60.0
LEAST_SECONDS = 20.0
"""The minimum timeout of ``start``, in seconds: importing torch may take longer than the timeout of operations."""

_LOOK_SECONDS = 0.5
_OTHERS_END_SECONDS = 5.0  # time within which the reporting rank has to end the job
_REPORTED = "reported"  # name of the address that the reporting rank binds
_CALLS = "mpi.start() or init_process_group()"


def limit_of(tuning: Tuning) -> float:
    """Return the limit of the wait in ``start``, in seconds: the operations' timeout, at least 20; 0 means no limit."""
    return max(tuning.deadline_seconds, LEAST_SECONDS) if tuning.deadline_seconds else 0.0


class Wait:
    """A wait for all ranks of the job in the function ``called``, which is reported after ``seconds`` (0: never).

    If all ranks of the job wait on this host, this rank reports after 60 s at the earliest, because MPI may still be
    connecting the ranks. With ``at_deadline="report"`` the wait continues after the report; otherwise the job ends.
    """

    def __init__(self, called: str, seconds: float, at_deadline: str) -> None:
        self.called, self._seconds, self._ends = called, seconds, at_deadline != "report"
        rank, self._size = variables.rank_in(os.environ), variables.size_in(os.environ)
        self._rank, self._is_watched = rank or 0, rank is not None and self._size != 1 and seconds > 0
        self._over = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a ``with`` block in which this rank waits for all other ranks."""
        if not self._is_watched:
            yield
            return
        with contextlib.ExitStack() as sockets:
            _bind(_address(str(self._rank)), sockets)
            threading.Thread(target=self._watch, args=(sockets,), name="torchmpi_py-arrival", daemon=True).start()
            try:
                yield
            finally:
                self._over.set()

    def _watch(self, sockets: contextlib.ExitStack) -> None:
        """Report the wait after the timeout, and then end the job, unless the wait should continue.

        This method runs in a thread. ``sockets`` closes the addresses of this rank after the wait.
        """
        ages, is_reported = watchdog.Ages(time.monotonic()), False
        while (age := ages.seconds.get(0, 0.0)) < self._seconds or (age < _CONNECT_SECONDS and self._all_are_here()):
            if self._over.wait(min(_LOOK_SECONDS, self._seconds)):
                return
            ages.look([0], time.monotonic())
            is_reported = is_reported or _is_bound(_address(_REPORTED))
        # One rank of the host reports: the first rank that binds the address. The other ranks wait for that rank to end
        # the job. If the job still runs some seconds later, another program of this user may have bound the address, so
        # this rank reports too.
        is_reported = is_reported or not _bind(_address(_REPORTED), sockets)
        if is_reported and (not self._ends or self._over.wait(_OTHERS_END_SECONDS)):
            return
        report = self.report()
        watchdog.print_to_stderr(f"torchmpi_py: {report}")
        # During this wait the other ranks find the bound address, and do not report too.
        if self._ends and not self._over.wait(2 * _LOOK_SECONDS):
            self._end_job(report.split(". Every rank")[0])

    def _all_are_here(self) -> bool:
        """Return whether all ranks of the job wait on this host. If so, MPI is still connecting them."""
        ranks = range(self._size or 0) if variables.job_name(os.environ) else ()
        return bool(ranks) and all(_is_bound(_address(str(rank))) for rank in ranks)

    def report(self) -> str:
        """Return a text that lists the waiting and the missing ranks, as far as they are known on this host."""
        here = [rank for rank in range(self._size or 0) if _is_bound(_address(str(rank)))] or [self._rank]
        who = f"{_ranks(here)} of {self._size or '?'} still wait{'s' * (len(here) == 1)} in {self.called}"
        end = "the job ends" if self._ends else "the wait continues"
        seconds = max(self._seconds, _CONNECT_SECONDS) if self._all_are_here() else self._seconds
        return f"{who} after {seconds:g} s. {self._missing(here)}. Every rank has to call {_CALLS}; {end}"

    def _missing(self, here: list[int]) -> str:
        """Return a sentence about the missing ranks; ``here`` lists the waiting ranks of this host."""
        size, on_host = self._size, variables.local_size_in(os.environ)
        if size is None or not variables.job_name(os.environ):
            return "It is not known which ranks are missing"
        if len(here) == size:
            return "No rank is missing, but MPI has not connected the ranks: check MPI's transport settings"
        if on_host == size:
            running = exit_marks.ranks_running(Path(os.environ.get("TORCHMPIRUN_JOB_DIR", os.devnull)))
            missing = [rank for rank in range(size) if rank not in here]
            return f"Missing: {', '.join(f'rank {rank}{_state(rank, running)}' for rank in missing)}"
        others = f"host {socket.gethostname()}; the ranks on other hosts are not known here"
        if on_host is None or len(here) == on_host:
            return f"No rank is missing on {others}" if on_host else f"These ranks wait on {others}"
        return f"{on_host - len(here)} of {on_host} ranks are missing on {others}"

    def _end_job(self, report: str) -> None:
        # This ends the job if MPI has started. Otherwise the launcher ends the other ranks when this rank exits.
        abort.abort(abort.EXIT_CODE, report)
        with contextlib.suppress(Exception):
            folder = os.environ.get("TORCHMPIRUN_JOB_DIR", "")
            exit_marks.record_failure(folder, self._rank, abort.EXIT_CODE, report)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        exit_marks.wait_for_output()
        os._exit(abort.EXIT_CODE)


def initialise_mpi() -> None:
    """Initialize MPI with mpi4py's settings, as an import of mpi4py.MPI would, but let Python's other threads run.

    All ranks of the job must make this call.
    """
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    required = ctypes.c_int(getattr(MPI, f"THREAD_{level.upper()}"))
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, required, ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread failed with code {code}")
    handler = {"exception": "ERRORS_RETURN", "abort": "ERRORS_ABORT", "fatal": "ERRORS_ARE_FATAL"}.get(mpi4py.rc.errors)
    if handler is not None:  # With "default" MPI keeps its own handler.
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(getattr(MPI, handler))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _state(rank: int, running: dict[int, int]) -> str:
    """Return the state of a missing rank, in parentheses; ``running`` maps each rank that still runs to its process ID.

    0 stands for an unknown process ID. If ``running`` is empty, nothing is known about the ranks, so return "".
    """
    if not running:
        return ""
    if rank not in running:
        return " (has ended)"
    return f" (process {running[rank]})" if running[rank] else ""


def _address(who: str) -> str:
    job = zlib.crc32(os.fsencode(variables.job_name(os.environ)))  # The full name may be too long for an address.
    return f"\0torchmpi_py-{os.getuid()}-{job:08x}-{who}"


def _bind(address: str, sockets: contextlib.ExitStack) -> bool:
    """Bind an address until ``sockets`` is closed; return False if another process has bound the address."""
    listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        listener.bind(address)
    except OSError:
        return False
    listener.listen(socket.SOMAXCONN)  # Linux completes up to this many connections although nothing accepts them.
    return True


def _is_bound(address: str) -> bool:
    """Return whether a process of this user has bound the address; another user's process does not count."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if (code := probe.connect_ex(address)) != 0:
            return code == errno.EAGAIN  # Earlier probes, which nothing accepts, fill the listener's queue.
        process_user_and_group = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return bool(struct.unpack("3i", process_user_and_group)[1] == os.getuid())
