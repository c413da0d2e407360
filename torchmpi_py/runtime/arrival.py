"""The first wait of a rank, for all ranks to start: after the deadline a report names the ranks that have not come.

MPI waits for all ranks as it starts, and so does the first exchange of ``start``, where mpi4py has started MPI before.
The ranks share nothing yet. So each rank binds a Unix socket to an abstract address of its own, which needs no file,
and the other ranks of the host connect to the address of each rank, to see whether the rank waits. Of ranks on other
hosts nothing is known but that they do not all wait here.

MPI is started through ctypes, which lets Python's other threads run meanwhile; mpi4py does not.
"""

from __future__ import annotations

import contextlib
import ctypes
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
"""The least deadline of a start: that of operations may be shorter than it takes to import torch."""

_LOOK_SECONDS = 0.5
_OTHERS_END_SECONDS = 5.0  # for the rank that reports to end the job
_REPORTED = "reported"  # the address of the rank that reports
_CALLS = "mpi.start() or init_process_group()"


def limit_of(tuning: Tuning) -> float:
    """The time for which a start waits for all ranks: that of operations, and at least 20 s. 0: for ever."""
    return max(tuning.deadline_seconds, LEAST_SECONDS) if tuning.deadline_seconds else 0.0


class Wait:
    """A wait for all ranks of the job, in the function ``called``, of at most ``seconds`` (0: of any length).

    Where all ranks wait on this host, and MPI has yet to connect them, a shorter limit than 60 s does not count.
    ``at_deadline``: with "report" the wait goes on after the report, else the job ends.
    """

    def __init__(self, called: str, seconds: float, at_deadline: str) -> None:
        self.called, self._seconds, self._ends = called, seconds, at_deadline != "report"
        rank, self._size = variables.rank_in(os.environ), variables.size_in(os.environ)
        self._rank, self._is_watched = rank or 0, rank is not None and self._size != 1 and seconds > 0
        self._over = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the block, in which this rank waits for all others."""
        if not self._is_watched:
            yield
            return
        with contextlib.ExitStack() as held:
            _bind(_address(str(self._rank)), held)
            threading.Thread(target=self._watch, args=(held,), name="torchmpi_py-arrival", daemon=True).start()
            try:
                yield
            finally:
                self._over.set()

    def _watch(self, held: contextlib.ExitStack) -> None:
        """In a thread: report a wait that takes too long, and end the job. ``held``: what the end of the wait frees."""
        ages, is_reported = watchdog.Ages(time.monotonic()), False
        while (age := ages.seconds.get(0, 0.0)) < self._seconds or (age < _CONNECT_SECONDS and self._all_are_here()):
            if self._over.wait(min(_LOOK_SECONDS, self._seconds)):
                return
            ages.look([0], time.monotonic())
            is_reported = is_reported or _is_bound(_address(_REPORTED))
        # One rank of the host reports: the one that binds the address. The others leave the end of the job to that rank
        # unless the job is still here some seconds later: another program of this user may have bound the address.
        is_reported = is_reported or not _bind(_address(_REPORTED), held)
        if is_reported and (not self._ends or self._over.wait(_OTHERS_END_SECONDS)):
            return
        report = self.report()
        watchdog.print_to_stderr(f"torchmpi_py: {report}")
        if self._ends and not self._over.wait(2 * _LOOK_SECONDS):  # in which the others see the address
            self._end_job(report.split(". Every rank")[0])

    def _all_are_here(self) -> bool:
        """Whether every rank of the job waits on this host: MPI connects them, which a busy host makes slow."""
        ranks = range(self._size or 0) if variables.job_name(os.environ) else ()
        return bool(ranks) and all(_is_bound(_address(str(rank))) for rank in ranks)

    def report(self) -> str:
        """The ranks that wait and the ranks that are missing, as far as this host shows."""
        here = [rank for rank in range(self._size or 0) if _is_bound(_address(str(rank)))] or [self._rank]
        who = f"{_ranks(here)} of {self._size or '?'} wait{'s' * (len(here) == 1)} in {self.called}"
        end = "the job ends" if self._ends else "the wait goes on"
        seconds = max(self._seconds, _CONNECT_SECONDS) if self._all_are_here() else self._seconds
        return f"{who}, for {seconds:g} s now. {self._missing(here)}. Every rank has to call {_CALLS}; {end}"

    def _missing(self, here: list[int]) -> str:
        """The sentence on the missing ranks; ``here``: the ranks of this host that wait."""
        size, on_host = self._size, variables.local_size_in(os.environ)
        if size is None or not variables.job_name(os.environ):
            return "Which ranks are missing is not known here"
        if len(here) == size:
            return "No rank is missing: MPI itself does not connect them"
        if on_host == size:
            running = exit_marks.ranks_running(Path(os.environ.get("TORCHMPIRUN_JOB_DIR", os.devnull)))
            missing = [rank for rank in range(size) if rank not in here]
            return f"Missing: {', '.join(f'rank {rank}{_state(rank, running)}' for rank in missing)}"
        others = f"host {socket.gethostname()}; of those of other hosts nothing is known here"
        if on_host is None or len(here) == on_host:
            return f"None is missing on {others}" if on_host else f"These are on {others}"
        return f"{on_host - len(here)} of {on_host} ranks are missing on {others}"

    def _end_job(self, report: str) -> None:
        abort.abort(abort.EXIT_CODE, report)  # where MPI is started; else the launcher ends the others when one ends
        with contextlib.suppress(Exception):
            folder = os.environ.get("TORCHMPIRUN_JOB_DIR", "")
            exit_marks.record_failure(folder, self._rank, abort.EXIT_CODE, report)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        exit_marks.wait_for_output()
        os._exit(abort.EXIT_CODE)


def initialise_mpi() -> None:
    """Start MPI as the import of mpi4py would, with its settings, while Python's other threads run.

    Collective over all ranks of the job.
    """
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    required = ctypes.c_int(getattr(MPI, f"THREAD_{level.upper()}"))
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, required, ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread failed with code {code}")
    handler = {"exception": "ERRORS_RETURN", "abort": "ERRORS_ABORT", "fatal": "ERRORS_ARE_FATAL"}.get(mpi4py.rc.errors)
    if handler is not None:  # with "default" MPI's own stays
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(getattr(MPI, handler))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _state(rank: int, running: dict[int, int]) -> str:
    """What torchmpirun knows of a missing rank; ``running``: the processes of the ranks that have not ended."""
    if not running:
        return ""
    if rank not in running:
        return " (has ended)"
    return f" (process {running[rank]})" if running[rank] else ""


def _address(who: str) -> str:
    job = zlib.crc32(os.fsencode(variables.job_name(os.environ)))  # the name may be too long for an address
    return f"\0torchmpi_py-{os.getuid()}-{job:08x}-{who}"


def _bind(address: str, held: contextlib.ExitStack) -> bool:
    """Bind an address until the wait is over; False if another process has it."""
    bound = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        bound.bind(address)
    except OSError:
        return False
    bound.listen(socket.SOMAXCONN)  # without accept: each rank of the host connects once or twice
    return True


def _is_bound(address: str) -> bool:
    """Whether a process of this user has bound the address; another user could, too, and does not count."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(address) != 0:
            return False
        process_user_and_group = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return bool(struct.unpack("3i", process_user_and_group)[1] == os.getuid())
