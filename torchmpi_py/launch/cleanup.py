"""Clear away what a job may leave on this host: processes, shared memory, session folders.

Nothing of another job is ever touched. These rules decide what belongs to the job:

- A *process* belongs to the job if its environment names the job's folder, and it runs under this user and in this
  container (PID namespace). Root sees the processes of other users too. Children inherit the variable whatever they do.
  A rank that sets its title (setproctitle) overwrites the environment that others see, so the rank's mark names it. A
  process that becomes another program (exec) shows no environment for some milliseconds, so a look waits for it.
- A *file in /dev/shm* belongs to the job if an MPI, torch or this package has chosen its name. In addition a process of
  the job must have it open or mapped. MPIs remove their files in MPI_Finalize, which a killed or aborted rank does not
  reach. This package removes its files when all ranks have mapped them. A file that a process outside the job also
  holds stays. Other files that a user keeps in /dev/shm, such as a data set, stay too.
- MPICH's *files with random names* cannot always be assigned to a job. A rank may die before its maps are read, and a
  killed hydra proxy leaves a topology file. They are removed if they appeared during the job and nobody can own them.
  That means that no process has the file open or mapped, and for a topology file that no hydra proxy lives.
- Open MPI's *session folder* lies in the job's folder (`mpirun.Vendor`) and is removed with it. If the user has chosen
  another place, the folder there has mpirun's process number in its name.

`Remains` describes all of this for one job, and a file in the job's folder stores it. torchmpirun clears it away when
the job has ended. If torchmpirun was killed with signal 9, a *guardian* does. This program (`guardian`) is started by
torchmpirun before the first rank, with the job's folder as argument and a pipe as input. If all goes well, torchmpirun
kills the guardian. If the pipe breaks before that, torchmpirun is gone. The kernel has then sent SIGTERM to mpirun
(`job`), which gets the usual time to end the ranks, also on other hosts. Then the guardian kills what is left here, and
removes the job's files and folder. An exit handler of torchmpirun would not do, because signal 9 runs none.

torchmpirun and the guardian each leave a mark in the folder (`exit_marks`). If both were killed, the user's next
torchmpirun starts a new guardian for the folder with a broken pipe, and does not wait for it (`clear_abandoned`). The
folders of ``--groups`` and ``--timeline`` last longer than a job, and each has a guardian of its own.

The guardian leads a session of its own, which no terminal ends, and its environment does not name the job's folder.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmpi_py import trusted_files
from torchmpi_py.launch import exit_marks, proc

FOLDER_PREFIX = "torchmpirun-"  # Start of a job folder's name, in the directory for temporary files.
GRACE_SECONDS = 5.0  # Time for mpirun to end after a signal.
KILL_SECONDS = 5.0  # Time for processes to end after SIGKILL.
EXEC_SECONDS = 1.0  # Time for processes to finish exec, which may wait for a core or for the program's file system.
_TRACKER_SECONDS = 1.0  # Time for Python's resource trackers to remove the files of killed processes.
# Text on the command line of the resource trackers of multiprocessing and joblib.
_TRACKER = b".resource_tracker import main"
_SHARED_MEMORY = "/dev/shm/"
_NAMES = (
    "sm_segment.",
    "vader_segment.",
    "osc_sm",
    "osc_rdma",
    "mpich_",
    "ucx_shm_",
    "Intel_MPI_",
    "torch_",
    "torchmpi_py_",
)
_TOPOLOGY = "/tmp/hydra_hwloc_xmlfile_"
_RANDOM_NAMES = ("/dev/shm/mpich_shm_*", "/dev/shm/mpich_vci_*", f"{_TOPOLOGY}*")


def randomly_named() -> set[str]:
    """Return MPICH's files on this host, of any job."""
    return {name for pattern in _RANDOM_NAMES for name in glob.glob(pattern)}


@dataclass
class Remains:
    """The known processes and files of one job on this host."""

    folder: Path
    starter: int = 0  # mpirun's process
    files_before: set[str] = field(default_factory=randomly_named)  # MPICH's files of earlier jobs
    shared_memory: set[str] = field(default_factory=set)
    stop_signals: Sequence[int] = ()  # signals that end mpirun, if SIGTERM does not

    @property
    def variable(self) -> str:
        """The environment entry that each process of the job has."""
        return f"TORCHMPIRUN_JOB_DIR={self.folder}"

    def processes(self) -> list[int]:
        """Return the job's processes except this one."""
        ranks = exit_marks.processes_of_ranks(self.folder) - {os.getpid()}
        return sorted(ranks.union(processes_with(self.variable)))

    def has(self, process_id: int) -> bool:
        """Return whether this process lives and belongs to the job."""
        return lives_with(process_id, self.variable) or process_id in exit_marks.processes_of_ranks(self.folder)

    def describe(self) -> None:
        """Store in the folder what must be cleared away if torchmpirun is killed."""
        state = (self.starter, self.files_before, self.shared_memory, [int(each) for each in self.stop_signals])
        exit_marks.leave(self.folder, "remains", ascii(state))

    @classmethod
    def described(cls, folder: Path) -> Remains:
        """Return what `describe` has stored; only the processes if it could not store anything."""
        try:
            return cls(folder, *ast.literal_eval((folder / "remains").read_text()))
        except OSError:
            return cls(folder)

    def look(self) -> None:
        """Record the shared memory that the job's processes hold."""
        if more := shared_memory(self.processes()) - self.shared_memory:
            self.shared_memory |= more
            self.describe()

    def kill(self, reap: Callable[[], object] = lambda: None) -> None:
        """Kill the job's processes; ``reap`` waits for mpirun if mpirun is a child of this process.

        Python's resource trackers end after the processes that use them, and remove the shared memory of these
        processes. So the trackers are killed only if they have not ended soon after the other processes.
        """
        now = time.monotonic()
        until, others_until = now + KILL_SECONDS, now
        while (alive := self.processes()) and (now := time.monotonic()) < until:
            others = [process_id for process_id in alive if not _is_tracker(process_id)]
            if others:
                others_until = now
            for process_id in alive if now - others_until > _TRACKER_SECONDS else others:
                # repeat, because a process may start another one before it dies
                send_signal(process_id, signal.SIGKILL)
            reap()
            time.sleep(0.02)

    def clear(self, reap: Callable[[], object] = lambda: None) -> None:
        """Kill the living processes and remove the files that they leave; the job's folder stays."""
        self.look()  # first what living processes hold; below what failed ranks recorded
        self.kill(reap)
        for failure in exit_marks.failures(self.folder):
            self.shared_memory.update(failure.held)
        appeared = randomly_named() - self.files_before
        remove_shared_memory(self.shared_memory | appeared)
        remove_topology(appeared)
        remove_session_folder(self.starter)


def processes_with(variable: str) -> list[int]:
    """Return the processes except this one that have ``variable`` (``NAME=value``) in their environment."""
    until = time.monotonic() + EXEC_SECONDS
    return [process_id for process_id in proc.others() if lives_with(process_id, variable, until)]


def lives_with(process_id: int, variable: str, until: float | None = None) -> bool:
    """Return whether this process lives and has ``variable`` in its environment.

    Waits for a process in the middle of exec, at most ``until`` this time of the monotonic clock.
    """
    if not _is_ours(process_id):
        return False
    until = time.monotonic() + EXEC_SECONDS if until is None else until
    content = proc.read(process_id, "environ")  # empty if the process has ended
    while not content and proc.has_memory(process_id) and time.monotonic() < until:
        is_in_exec = not proc.read(process_id, "cmdline")  # exec sets arguments and environment together
        content = proc.read(process_id, "environ")
        if not is_in_exec:
            break
        time.sleep(0.001)
    return os.fsencode(variable) + b"\0" in content


def _is_ours(process_id: int) -> bool:
    """Return whether a process belongs to this user and to this PID namespace."""
    with contextlib.suppress(OSError):
        is_same_user = os.stat(f"/proc/{process_id}").st_uid == os.geteuid()
        return is_same_user and os.path.samefile(f"/proc/{process_id}/ns/pid", "/proc/self/ns/pid")
    return False


def _is_tracker(process_id: int) -> bool:
    return _TRACKER in proc.read(process_id, "cmdline")


def send_signal(process_id: int, signum: int) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(OSError):
        os.kill(process_id, signum)


def shared_memory(process_ids: Iterable[int]) -> set[str]:
    """Return the files in /dev/shm that these processes have open or mapped and that still have a name.

    Only names that an MPI, torch or this package uses count.
    """
    paths: list[str] = []
    for process_id in process_ids:
        # read this first, because a process that creates a file maps it before closing it
        paths += proc.open_files(process_id)
        paths += map(os.fsdecode, re.findall(rb" (/dev/shm/.*)", proc.read(process_id, "maps")))
    return set(filter(_may_be_a_jobs, paths))


def _may_be_a_jobs(path: str) -> bool:
    folder, _, name = path.partition(_SHARED_MEMORY)
    return not folder and name.startswith(_NAMES) and not name.endswith("(deleted)")


def remove_shared_memory(names: set[str]) -> None:
    """Remove the files of this user that no living process has open or mapped."""
    names = {name for name in names if _may_be_a_jobs(name) and trusted_files.is_own(name)}
    if names:
        names -= shared_memory(proc.others())
    for name in names:
        if not _is_held(name):
            Path(name).unlink(missing_ok=True)


def _is_held(name: str) -> bool:
    """Return whether any process has a file open or mapped: Linux grants no lease then.

    Unlike a look at /proc this also sees processes of other containers.
    """
    try:
        with open(name, "rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def remove_topology(names: set[str]) -> None:
    """Remove this user's files with a topology, unless a living hydra proxy may read them."""
    names = {name for name in names if name.startswith(_TOPOLOGY) and trusted_files.is_own(name)}
    if names and not any(b"hydra_pmi_proxy\0" in proc.read(number, "cmdline") for number in proc.others()):
        for name in names:
            Path(name).unlink(missing_ok=True)


def remove_session_folder(starter: int) -> None:
    """Remove this mpirun's folder from the place that the user has chosen for it."""
    for name in ("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"):
        if place := os.environ.get(name):
            shutil.rmtree(os.path.join(place, f"ompi.{starter}"), ignore_errors=True)


class Guardian:
    """The guardian process of a folder, as torchmpirun sees it.

    The guardian waits for torchmpirun's end, or without ``waits`` begins at once.
    """

    def __init__(self, folder: str, *, waits: bool = True) -> None:
        self.folder, self.waits = folder, waits

    def __enter__(self) -> Guardian:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), self.folder],
            stdin=subprocess.PIPE if self.waits else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # the variable of an outer job
            env={name: value for name, value in os.environ.items() if name != "TORCHMPIRUN_JOB_DIR"},
            start_new_session=True,
        )
        for process_id in (os.getpid(), self.process.pid):
            exit_marks.record(self.folder, f"guard-{process_id}", process_id)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def clear_abandoned() -> list[Guardian]:
    """Start guardians that clear away what this user's killed jobs left on this host; do not wait."""
    guardians = []
    with contextlib.suppress(OSError):  # the job's own folder needs this place too, and its creation reports the error
        for entry in [entry for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith(FOLDER_PREFIX)]:
            is_own = entry.is_dir(follow_symlinks=False) and trusted_files.is_own(entry.path)
            if is_own and exit_marks.is_abandoned(entry.path):
                guardians.append(Guardian(entry.path, waits=False).__enter__())
    return guardians


def clean_up(folder: str) -> None:
    """Wait for the end of a job, then remove its remains and its folder."""
    remains = Remains.described(Path(folder))
    for signum in [0, *remains.stop_signals[1:]]:  # the kernel has sent the first signal, or SIGTERM
        if signum and lives_with(remains.starter, remains.variable):
            send_signal(remains.starter, signum)
        until = time.monotonic() + GRACE_SECONDS
        while lives_with(remains.starter, remains.variable) and time.monotonic() < until:
            remains.look()
            time.sleep(0.05)
    try:
        remains.clear()
    finally:
        until = time.monotonic() + KILL_SECONDS
        while remains.folder.exists() and time.monotonic() < until:  # processes that are ending may still write there
            shutil.rmtree(remains.folder, ignore_errors=True)
            time.sleep(0.02)
