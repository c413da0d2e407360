"""What a job may leave on this host: processes, shared memory, session folders. Only this job's are ever touched.

- A *process* is the job's when its environment has the job's mark; children inherit it whatever they do.
- A *file in /dev/shm* is the job's when one of its processes maps it. MPIs unlink theirs in MPI_Finalize, which a
  killed or aborted rank does not reach. A file that a process outside the job maps as well stays.
- MPICH's *files with random names* cannot always be tied to a job: a rank may die before anyone has looked at what it
  maps, and nobody maps the topology file of a hydra proxy that was cut short. They go when they appeared during the
  job, no process maps them, and no hydra proxy lives that could own them.
- Open MPI's *session folder* has the process id of its mpirun in its name.
"""

import glob
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/"
_RANDOMLY_NAMED = ("/dev/shm/mpich_shm_*", "/dev/shm/mpich_vci_*", "/tmp/hydra_hwloc_xmlfile_*")


def processes_marked(mark: str) -> list[int]:
    """Processes, this one excepted, that have `mark` (``NAME=value``) in their environment."""
    needle = mark.encode() + b"\0"
    return [process_id for process_id in _processes() if needle in _read(f"/proc/{process_id}/environ")]


def shared_memory(processes: Iterable[int]) -> set[str]:
    """Files in /dev/shm that these processes map and that still have a name."""
    held: set[str] = set()
    for process_id in processes:
        for line in _read(f"/proc/{process_id}/maps").splitlines():
            _, found, name = line.partition(b" " + _SHARED_MEMORY.encode())
            if found and not name.endswith(b"(deleted)"):
                held.add(_SHARED_MEMORY + os.fsdecode(name))
    return held


def remove_shared_memory(names: set[str]) -> None:
    """Remove those of the files that exist and that no living process maps."""
    names = {name for name in names if os.path.exists(name)}
    if names:
        for name in names - shared_memory(_processes()):
            Path(name).unlink(missing_ok=True)


def randomly_named() -> set[str]:
    """MPICH's files on this host that belong to this user, whichever job they are of."""
    names = {name for pattern in _RANDOMLY_NAMED for name in glob.glob(pattern)}
    return {name for name in names if _owner(name) == os.getuid()}


def remove_randomly_named(before: set[str]) -> None:
    """Remove those that were not there `before` the job, unless a proxy lives that could own them."""
    names = randomly_named() - before
    if names and not any(b"hydra_pmi_proxy\0" in _read(f"/proc/{process_id}/cmdline") for process_id in _processes()):
        remove_shared_memory(names)


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
