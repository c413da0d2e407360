"""What a job may leave on this host: processes, shared memory, session folders. Only this job's are ever touched.

- A *process* is the job's when its environment has the job's mark; children inherit it whatever they do.
- A *file in /dev/shm* is the job's when it has a name that an MPI gives and one of the job's processes has it open or
  mapped. MPIs unlink theirs in MPI_Finalize, which a killed or aborted rank does not reach. A file that a process
  outside the job holds as well stays, and so does what a user keeps in /dev/shm, a data set for instance.
- MPICH's *files with random names* cannot always be tied to a job: a rank may die before anyone has looked at what it
  maps, and a hydra proxy that was cut short leaves a topology file. They go when they appeared during the job and
  nobody can own them: no process has the file open or mapped, and for a topology file, no hydra proxy lives.
- Open MPI's *session folder* has the process id of its mpirun in its name.

`Remains` is all of this for one job. torchmpirun clears them away at the job's end, and its guardian does where
torchmpirun was killed (`guardian`).
"""

import contextlib
import glob
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torchmpi_py.launch import exit_marks

_SHARED_MEMORY = "/dev/shm/"
_NAMES = ("sm_segment.", "vader_segment.", "osc_sm", "osc_rdma", "mpich_", "ucx_shm_", "Intel_MPI_", "torch_")
_RANDOM_SHARED_MEMORY = ("/dev/shm/mpich_shm_*", "/dev/shm/mpich_vci_*")
_RANDOM_TOPOLOGY = ("/tmp/hydra_hwloc_xmlfile_*",)


@dataclass
class Remains:
    """What one job has on this host, as far as is known; ``starter`` is the process of the MPI's starter."""

    folder: Path
    starter: int = 0
    files_before: set[str] = field(default_factory=lambda: randomly_named())
    shared_memory: set[str] = field(default_factory=set)

    @property
    def mark(self) -> str:
        """The entry in the environment of each of the job's processes."""
        return f"TORCHMPIRUN_JOB_DIR={self.folder}"

    def processes(self) -> list[int]:
        """The job's processes."""
        return processes_marked(self.mark)

    def look(self) -> bool:
        """Note the shared memory that the job's processes hold; whether there is more than before."""
        num_before = len(self.shared_memory)
        self.shared_memory |= shared_memory(self.processes())
        return len(self.shared_memory) > num_before

    def kill(self, reap: Callable[[], object] = lambda: None) -> None:
        """Kill the job's processes; ``reap`` waits for the starter, where that is a child."""
        for _ in range(20):  # again, for a process may start another before it dies
            alive = self.processes()
            if not alive:
                break
            for process_id in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            reap()
            time.sleep(0.02)

    def clear(self, reap: Callable[[], object] = lambda: None) -> None:
        """Kill what lives, and remove what it leaves; the job's folder stays."""
        self.look()
        self.kill(reap)
        for failure in exit_marks.failures(self.folder):
            self.shared_memory.update(failure.held)
        remove_shared_memory(self.shared_memory)
        remove_randomly_named(self.files_before)
        remove_session_folders(self.starter)


def processes_marked(mark: str) -> list[int]:
    """Processes, this one excepted, that have `mark` (``NAME=value``) in their environment."""
    return [process_id for process_id in _processes() if is_marked(process_id, mark)]


def is_marked(process_id: int, mark: str) -> bool:
    """Whether this process lives and has `mark` in its environment."""
    return mark.encode() + b"\0" in _read(f"/proc/{process_id}/environ")


def shared_memory(processes: Iterable[int]) -> set[str]:
    """Files of MPIs in /dev/shm that these processes have open or mapped and that still have a name."""
    held: set[str] = set()
    for process_id in processes:
        held |= _open_shared_memory(process_id)  # first, for who creates a file maps it before closing it
        for line in _read(f"/proc/{process_id}/maps").splitlines():
            _, found, name = line.partition(b" " + _SHARED_MEMORY.encode())
            if found:
                held.add(_SHARED_MEMORY + os.fsdecode(name))
    return set(filter(_is_of_an_mpi, held))


def _is_of_an_mpi(name: str) -> bool:
    return name.removeprefix(_SHARED_MEMORY).startswith(_NAMES) and not name.endswith("(deleted)")


def _open_shared_memory(process_id: int) -> set[str]:
    held: set[str] = set()
    folder = f"/proc/{process_id}/fd"
    try:
        for descriptor in os.listdir(folder):
            target = os.readlink(f"{folder}/{descriptor}")
            if target.startswith(_SHARED_MEMORY):
                held.add(target)
    except OSError:  # it has ended, or is another user's
        pass
    return held


def remove_shared_memory(names: set[str]) -> None:
    """Remove those of the files that exist and that no living process has open or mapped."""
    names = {name for name in names if _is_of_an_mpi(name) and os.path.exists(name)}
    if names:
        for name in names - shared_memory(_processes()):
            Path(name).unlink(missing_ok=True)


def randomly_named() -> set[str]:
    """MPICH's files on this host that belong to this user, whichever job they are of."""
    return _mine(_RANDOM_SHARED_MEMORY) | _mine(_RANDOM_TOPOLOGY)


def remove_randomly_named(before: set[str]) -> None:
    """Remove those that were not there `before` the job and that nobody can own."""
    remove_shared_memory(_mine(_RANDOM_SHARED_MEMORY) - before)
    topology = _mine(_RANDOM_TOPOLOGY) - before
    if topology and not any(b"hydra_pmi_proxy\0" in _read(f"/proc/{number}/cmdline") for number in _processes()):
        for name in topology:
            Path(name).unlink(missing_ok=True)


def _mine(patterns: Iterable[str]) -> set[str]:
    return {name for pattern in patterns for name in glob.glob(pattern) if _owner(name) == os.getuid()}


def _owner(name: str) -> int:
    try:
        return os.stat(name).st_uid
    except FileNotFoundError:
        return -1


def remove_session_folders(starter: int) -> None:
    """Remove the session folder of the mpirun with this process id; normally it is gone already."""
    for name in (f"ompi.{starter}", f"prte.{starter}"):
        shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _read(path: str) -> bytes:
    """The file's content; nothing when the process has ended or is another user's."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
