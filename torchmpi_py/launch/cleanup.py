"""What a job may leave on this host: processes, shared memory, session folders. Only this job's are ever touched.

- A *process* is the job's when its environment names the job's folder, and it has this user and is in this container
  (PID namespace): root sees the processes of others, too. Children inherit the variable whatever they do. A rank that
  sets its title (setproctitle) overwrites the environment that others see: the rank's mark names it. A process that
  becomes another program (exec) has for some milliseconds no environment that others see: a look at it waits for that.
- A *file in /dev/shm* is the job's when it has a name that an MPI, torch or this package gives and one of the job's
  processes has it open or mapped. MPIs unlink theirs in MPI_Finalize, which a killed or aborted rank does not reach;
  this package does when all ranks have mapped a file. A file that a process outside the job holds as well stays, and so
  does what a user keeps in /dev/shm, a data set for instance.
- MPICH's *files with random names* cannot always be tied to a job: a rank may die before anyone has looked at what it
  maps, and a hydra proxy that was cut short leaves a topology file. They go when they appeared during the job and
  nobody can own them: no process has the file open or mapped, and for a topology file, no hydra proxy lives.
- Open MPI's *session folder* lies in the job's folder (`mpirun.Vendor`), and goes with it; or where the user wants it,
  with the process id of its mpirun in its name.

`Remains` is all of this for one job, and a file in the job's folder describes it. torchmpirun clears it away when the
job has ended. Where torchmpirun was killed with signal 9 a *guardian* does: a program (`guardian`) that torchmpirun
starts before the first rank, with the job's folder as argument and a pipe as input. When all is in order torchmpirun
kills the guardian. When the pipe breaks before that, torchmpirun is gone: the kernel has sent SIGTERM to the MPI's
starter (`job`), which gets the usual time to end the ranks, also on other hosts; then the guardian kills what is left
here, and removes the job's files and folder.

torchmpirun and the guardian leave a mark each in the folder (`exit_marks`). If both were killed, the next torchmpirun
of the user starts another guardian for the folder, with a pipe that is broken, and goes on (`clear_abandoned`).
The folders of ``--groups`` and ``--timeline``, which last longer than a job, have each a guardian of their own.

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

FOLDER_PREFIX = "torchmpirun-"  # of a job's folder, in the place for temporary files
GRACE_SECONDS = 5.0  # for a starter that was asked to end
KILL_SECONDS = 5.0  # for processes to end by SIGKILL
EXEC_SECONDS = 1.0  # for the processes in exec, which may wait for a core, or for a file system that has the program
_TRACKER_SECONDS = 1.0  # for Python's resource trackers to remove what the killed have left
_TRACKER = b".resource_tracker import main"  # on the command line of multiprocessing's, and of joblib's
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
    """MPICH's files on this host, whichever job they are of."""
    return {name for pattern in _RANDOM_NAMES for name in glob.glob(pattern)}


@dataclass
class Remains:
    """What one job has on this host, as far as is known."""

    folder: Path
    starter: int = 0  # the process of the MPI's starter
    files_before: set[str] = field(default_factory=randomly_named)  # MPICH's, of former jobs
    shared_memory: set[str] = field(default_factory=set)
    stop_signals: Sequence[int] = ()  # what ends the starter, where SIGTERM does not

    @property
    def variable(self) -> str:
        """The entry that the environment of each of the job's processes has."""
        return f"TORCHMPIRUN_JOB_DIR={self.folder}"

    def processes(self) -> list[int]:
        """The job's processes, this one excepted."""
        ranks = exit_marks.processes_of_ranks(self.folder) - {os.getpid()}
        return sorted(ranks.union(processes_with(self.variable)))

    def has(self, process_id: int) -> bool:
        """Whether this process lives and is the job's."""
        return lives_with(process_id, self.variable) or process_id in exit_marks.processes_of_ranks(self.folder)

    def describe(self) -> None:
        """Leave in the folder what is to be cleared away if torchmpirun is killed."""
        what = (self.starter, self.files_before, self.shared_memory, [int(each) for each in self.stop_signals])
        exit_marks.leave(self.folder, "remains", ascii(what))

    @classmethod
    def described(cls, folder: Path) -> Remains:
        """What `describe` has left; nothing but the processes where it could not."""
        try:
            return cls(folder, *ast.literal_eval((folder / "remains").read_text()))
        except OSError:
            return cls(folder)

    def look(self) -> None:
        """Note the shared memory that the job's processes hold."""
        if more := shared_memory(self.processes()) - self.shared_memory:
            self.shared_memory |= more
            self.describe()

    def kill(self, reap: Callable[[], object] = lambda: None) -> None:
        """Kill the job's processes; ``reap`` waits for the starter, where that is a child.

        Python's resource trackers end when the processes that use them have, and remove the shared memory of those:
        they are killed only if they have not ended soon after the others.
        """
        now = time.monotonic()
        until, others_until = now + KILL_SECONDS, now
        while (alive := self.processes()) and (now := time.monotonic()) < until:
            others = [process_id for process_id in alive if not _is_tracker(process_id)]
            if others:
                others_until = now
            for process_id in alive if now - others_until > _TRACKER_SECONDS else others:
                send_signal(process_id, signal.SIGKILL)  # again, for a process may start another before it dies
            reap()
            time.sleep(0.02)

    def clear(self, reap: Callable[[], object] = lambda: None) -> None:
        """Kill what lives, and remove what it leaves; the job's folder stays."""
        self.look()  # what is held by processes that live; then by ranks that failed, which said so
        self.kill(reap)
        for failure in exit_marks.failures(self.folder):
            self.shared_memory.update(failure.held)
        appeared = randomly_named() - self.files_before
        remove_shared_memory(self.shared_memory | appeared)
        remove_topology(appeared)
        remove_session_folder(self.starter)


def processes_with(variable: str) -> list[int]:
    """Processes, this one excepted, that have ``variable`` (``NAME=value``) in their environment."""
    until = time.monotonic() + EXEC_SECONDS
    return [process_id for process_id in proc.others() if lives_with(process_id, variable, until)]


def lives_with(process_id: int, variable: str, until: float | None = None) -> bool:
    """Whether this process lives and has ``variable`` in its environment.

    A process in the middle of exec is waited for, ``until`` some time of the monotonic clock.
    """
    if not _is_ours(process_id):
        return False
    until = time.monotonic() + EXEC_SECONDS if until is None else until
    found = proc.read(process_id, "environ")  # nothing when it has ended
    while not found and proc.has_memory(process_id) and time.monotonic() < until:
        is_in_exec = not proc.read(process_id, "cmdline")  # arguments and environment come together
        found = proc.read(process_id, "environ")
        if not is_in_exec:
            break
        time.sleep(0.001)
    return os.fsencode(variable) + b"\0" in found


def _is_ours(process_id: int) -> bool:
    """Whether a process belongs to this user and to this PID namespace."""
    with contextlib.suppress(OSError):
        is_same_user = os.stat(f"/proc/{process_id}").st_uid == os.geteuid()
        return is_same_user and os.path.samefile(f"/proc/{process_id}/ns/pid", "/proc/self/ns/pid")
    return False


def _is_tracker(process_id: int) -> bool:
    return _TRACKER in proc.read(process_id, "cmdline")


def send_signal(process_id: int, signum: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(OSError):
        os.kill(process_id, signum)


def shared_memory(process_ids: Iterable[int]) -> set[str]:
    """Files in /dev/shm with such names that these processes have open or mapped and that still have a name."""
    held: list[str] = []
    for process_id in process_ids:
        held += proc.open_files(process_id)  # first, for a process that creates a file maps it before closing it
        held += map(os.fsdecode, re.findall(rb" (/dev/shm/.*)", proc.read(process_id, "maps")))
    return set(filter(_may_be_a_jobs, held))


def _may_be_a_jobs(path: str) -> bool:
    folder, _, name = path.partition(_SHARED_MEMORY)
    return not folder and name.startswith(_NAMES) and not name.endswith("(deleted)")


def remove_shared_memory(names: set[str]) -> None:
    """Remove those of this user's files that exist and that no living process has open or mapped."""
    names = {name for name in names if _may_be_a_jobs(name) and trusted_files.is_own(name)}
    if names:
        names -= shared_memory(proc.others())
    for name in names:
        if not _is_held(name):
            Path(name).unlink(missing_ok=True)


def _is_held(name: str) -> bool:
    """Whether a process has a file open or mapped, also one of another container: Linux grants no lease then."""
    try:
        with open(name, "rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def remove_topology(names: set[str]) -> None:
    """Remove those of these files that hold a topology and are this user's, unless a proxy lives that may read them."""
    names = {name for name in names if name.startswith(_TOPOLOGY) and trusted_files.is_own(name)}
    if names and not any(b"hydra_pmi_proxy\0" in proc.read(number, "cmdline") for number in proc.others()):
        for name in names:
            Path(name).unlink(missing_ok=True)


def remove_session_folder(starter: int) -> None:
    """Remove the folder of the mpirun with this process id from the place that the user has named for it."""
    for name in ("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"):
        if place := os.environ.get(name):
            shutil.rmtree(os.path.join(place, f"ompi.{starter}"), ignore_errors=True)


class Guardian:
    """torchmpirun's end of the guardian of a folder, which waits for torchmpirun's end, or begins at once."""

    def __init__(self, folder: str, *, waits: bool = True) -> None:
        self.folder, self.waits = folder, waits

    def __enter__(self) -> Guardian:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), self.folder],
            stdin=subprocess.PIPE if self.waits else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != "TORCHMPIRUN_JOB_DIR"},  # an outer job's
            start_new_session=True,
        )
        for process_id in (os.getpid(), self.process.pid):
            exit_marks.record(self.folder, f"guard-{process_id}", process_id)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def clear_abandoned() -> list[Guardian]:
    """Start guardians that clear away what killed jobs of this user left on this host; do not wait for them."""
    guardians = []
    with contextlib.suppress(OSError):  # the job's own folder needs that place, too, and the error is told there
        for entry in [entry for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith(FOLDER_PREFIX)]:
            is_own = entry.is_dir(follow_symlinks=False) and trusted_files.is_own(entry.path)
            if is_own and exit_marks.is_abandoned(entry.path):
                guardians.append(Guardian(entry.path, waits=False).__enter__())
    return guardians


def clean_up(folder: str) -> None:
    """Wait for the end of a job, then clear its remains and its folder away."""
    remains = Remains.described(Path(folder))
    for signum in [0, *remains.stop_signals[1:]]:  # the first one, or SIGTERM, came from the kernel
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
        while remains.folder.exists() and time.monotonic() < until:  # what ends may still write there
            shutil.rmtree(remains.folder, ignore_errors=True)
            time.sleep(0.02)
