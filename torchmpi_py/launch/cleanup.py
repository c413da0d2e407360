"""Remove the processes, shared memory and session folders that a job may leave on this host.

Processes and files of other jobs are never touched. These rules decide which ones belong to the job:

- A *process* belongs to the job if its variable TORCHMPIRUN_JOB_DIR contains the path of the job's folder. Child
  processes inherit the variable, even in a new session. The process must also run under this user and in this container
  (PID namespace), because root can see the processes of other users and containers. A rank that sets its title
  (setproctitle) overwrites the environment that other processes can read, so the rank is identified by its mark. A
  process that executes another program (exec) has an empty environment for some milliseconds, so `lives_with` repeats
  the test.
- A *file in /dev/shm* belongs to the job if a process of the job has it open or mapped. In addition, an MPI, torch or
  this package must have chosen its name. MPIs remove their files in MPI_Finalize, which a killed or aborted rank does
  not call. This package removes its files when all ranks have mapped them. A file that a process outside the job also
  has open or mapped is kept. Other files of the user in /dev/shm, such as a data set, are kept too.
- *Files with names that do not identify the job* (MPICH's and Open MPI's) cannot always be assigned to a job, because a
  rank may die before its maps are read. Such a file is removed if it appeared during the job and no process has it open
  or mapped. A killed hydra proxy leaves a topology file, which is removed only if no hydra proxy is alive.
- Open MPI's *session folder* is in the job's folder (`mpirun.Vendor`) and is removed with it. If the user has chosen
  another location, the name of the session folder contains mpirun's process ID.

`Remains` lists the processes and files of one job. The list is stored in a file in the job's folder, and torchmpirun
removes everything on the list when the job has ended. If torchmpirun was killed with signal 9, the *guardian* cleans up
instead. Before the first rank, torchmpirun starts this program (`guardian`), with the job's folder as argument and a
pipe as standard input. When torchmpirun has cleaned up, it kills the guardian. If the pipe breaks before that,
torchmpirun has died. The kernel has then sent SIGTERM to mpirun (`job`). mpirun gets the usual time to end the ranks,
also on other hosts. After that time, the guardian kills the remaining processes on this host, and removes the job's
files and folder. An exit handler in torchmpirun would not work, because no handler runs after signal 9.

torchmpirun writes two marks into the folder, one for itself and one for the guardian (`exit_marks`). If both processes
were killed, the user's next torchmpirun starts a new guardian for the folder (`clear_abandoned`). The new guardian
cleans up immediately, and torchmpirun does not wait for it. The folders of ``--groups`` and ``--timeline`` exist for
longer than a job, so each of them has a separate guardian.

The guardian runs in a new session, so that closing the terminal does not end it. Its environment contains no job's
folder, so that it does not count as a process of a job.
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

FOLDER_PREFIX = "torchmpirun-"  # First part of the name of a job's folder, in the directory for temporary files.
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
_RANDOM_NAMES = ("/dev/shm/mpich_???_*", f"/dev/shm/*_segment.{os.uname().nodename}.{os.geteuid()}.*", f"{_TOPOLOGY}*")


def randomly_named() -> set[str]:
    """Return the files on this host whose names do not identify a job, from any job."""
    return {name for pattern in _RANDOM_NAMES for name in glob.glob(pattern)}


@dataclass
class Remains:
    """The processes and files of one job that are known on this host."""

    folder: Path
    starter: int = 0  # process ID of mpirun
    files_before: set[str] = field(default_factory=randomly_named)  # such files that existed before the job
    shared_memory: set[str] = field(default_factory=set)
    stop_signals: Sequence[int] = ()  # signals that end mpirun, in order, if one SIGTERM is not enough

    @property
    def variable(self) -> str:
        """The environment variable that identifies the processes of the job, as ``NAME=value``."""
        return f"TORCHMPIRUN_JOB_DIR={self.folder}"

    def processes(self) -> list[int]:
        """Return the process IDs of the job, except this process."""
        ranks = exit_marks.processes_of_ranks(self.folder) - {os.getpid()}
        return sorted(ranks.union(processes_with(self.variable)))

    def has(self, process_id: int) -> bool:
        """Return whether a process is alive and belongs to the job."""
        return lives_with(process_id, self.variable) or process_id in exit_marks.processes_of_ranks(self.folder)

    def describe(self) -> None:
        """Store this object in the job's folder, so that the guardian can read it if torchmpirun is killed."""
        state = (self.starter, self.files_before, self.shared_memory, [int(each) for each in self.stop_signals])
        exit_marks.leave(self.folder, "remains", ascii(state))

    @classmethod
    def described(cls, folder: Path) -> Remains:
        """Return the object that `describe` has stored, or a new object if there is no stored object."""
        try:
            return cls(folder, *ast.literal_eval((folder / "remains").read_text()))
        except OSError:
            return cls(folder)

    def look(self) -> None:
        """Add to ``shared_memory`` the files that the job's processes have open or mapped now."""
        if more := shared_memory(self.processes()) - self.shared_memory:
            self.shared_memory |= more
            self.describe()

    def kill(self, reap: Callable[[], object] = lambda: None) -> None:
        """Kill the job's processes, and call ``reap`` to reap mpirun if mpirun is a child of this process.

        Python's resource tracker is a process that removes the shared memory of other processes after they have ended.
        So kill a tracker only if it has not ended soon after the other processes.
        """
        now = time.monotonic()
        until, others_until = now + KILL_SECONDS, now
        while (alive := self.processes()) and (now := time.monotonic()) < until:
            others = [process_id for process_id in alive if not _is_tracker(process_id)]
            if others:
                others_until = now
            for process_id in alive if now - others_until > _TRACKER_SECONDS else others:
                # Repeat this in the loop, because a process may start another process before it dies.
                send_signal(process_id, signal.SIGKILL)
            reap()
            time.sleep(0.02)

    def clear(self, reap: Callable[[], object] = lambda: None) -> None:
        """Kill the job's processes and remove its files, except the job's folder."""
        self.look()  # The files of a living process can be found only before it is killed.
        self.kill(reap)
        for failure in exit_marks.failures(self.folder):
            self.shared_memory.update(failure.held)
        appeared = randomly_named() - self.files_before
        remove_shared_memory(self.shared_memory | appeared)
        remove_topology(appeared)
        remove_session_folder(self.starter)


def processes_with(variable: str) -> list[int]:
    """Return the IDs of the other processes that have ``variable`` (``NAME=value``) in their environment."""
    until = time.monotonic() + EXEC_SECONDS
    return [process_id for process_id in proc.others() if lives_with(process_id, variable, until)]


def lives_with(process_id: int, variable: str, until: float | None = None) -> bool:
    """Return whether a process of this user is alive and has ``variable`` in its environment.

    If the process is calling exec, wait for the end of exec, at most until the monotonic time ``until``.
    """
    if not _is_ours(process_id):
        return False
    until = time.monotonic() + EXEC_SECONDS if until is None else until
    content = proc.read(process_id, "environ")  # The content is empty if the process has ended or is calling exec.
    while not content and proc.has_memory(process_id) and time.monotonic() < until:
        is_in_exec = not proc.read(process_id, "cmdline")  # Exec sets arguments and environment at the same time.
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
    """Send a signal to a process. Ignore errors, because the process may have ended."""
    with contextlib.suppress(OSError):
        os.kill(process_id, signum)


def shared_memory(process_ids: Iterable[int]) -> set[str]:
    """Return the files in /dev/shm that these processes have open or mapped, except unlinked files.

    The result contains only names that an MPI, torch or this package uses.
    """
    paths: list[str] = []
    for process_id in process_ids:
        # Read the open files before the maps: a process that creates a file maps the file before closing it.
        paths += proc.open_files(process_id)
        paths += map(os.fsdecode, re.findall(rb" (/dev/shm/.*)", proc.read(process_id, "maps")))
    return set(filter(_may_be_a_jobs, paths))


def _may_be_a_jobs(path: str) -> bool:
    folder, _, name = path.partition(_SHARED_MEMORY)
    return not folder and name.startswith(_NAMES) and not name.endswith("(deleted)")


def remove_shared_memory(names: set[str]) -> None:
    """Remove this user's files in ``names`` that no process has open or mapped."""
    names = {name for name in names if _may_be_a_jobs(name) and trusted_files.is_own(name)}
    if names:
        names -= shared_memory(proc.others())
    for name in names:
        if not _is_held(name):
            Path(name).unlink(missing_ok=True)


def _is_held(name: str) -> bool:
    """Return whether any process has the file open or mapped.

    Linux refuses a lease on such a file. Unlike a search of /proc, this test includes processes of other containers.
    """
    try:
        with open(name, "rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def remove_topology(names: set[str]) -> None:
    """Remove this user's topology files in ``names``, unless a hydra proxy is alive that may read them."""
    names = {name for name in names if name.startswith(_TOPOLOGY) and trusted_files.is_own(name)}
    if names and not any(b"hydra_pmi_proxy\0" in proc.read(number, "cmdline") for number in proc.others()):
        for name in names:
            Path(name).unlink(missing_ok=True)


def remove_session_folder(starter: int) -> None:
    """Remove mpirun's session folder from the directory that the user has chosen for session folders.

    ``starter`` is the process ID of mpirun.
    """
    for name in ("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"):
        if place := os.environ.get(name):
            shutil.rmtree(os.path.join(place, f"ompi.{starter}"), ignore_errors=True)


class Guardian:
    """A context manager that starts the guardian process of a folder, and kills the guardian at the end of the block.

    The guardian cleans up when torchmpirun has died; with ``waits=False`` it cleans up immediately.
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
            # Remove the variable of an outer job, so that the guardian does not count as a process of that job.
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
    """Start a guardian for each abandoned folder of this user on this host; return the guardians.

    A folder is abandoned if its torchmpirun and its guardian were killed. Do not wait for the new guardians.
    """
    guardians = []
    with contextlib.suppress(OSError):  # `new_folder` uses the same directory and reports the error.
        for entry in [entry for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith(FOLDER_PREFIX)]:
            is_own = entry.is_dir(follow_symlinks=False) and trusted_files.is_own(entry.path)
            if is_own and exit_marks.is_abandoned(entry.path):
                guardians.append(Guardian(entry.path, waits=False).__enter__())
    return guardians


def clean_up(folder: str) -> None:
    """Give mpirun time to end a job, then kill the job's remaining processes and remove its files and folder."""
    remains = Remains.described(Path(folder))
    for signum in [0, *remains.stop_signals[1:]]:  # The kernel has already sent the first signal, a SIGTERM.
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
        while remains.folder.exists() and time.monotonic() < until:  # Processes that are ending may still write files.
            shutil.rmtree(remains.folder, ignore_errors=True)
            time.sleep(0.02)
