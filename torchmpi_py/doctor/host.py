"""Checks of the host: cores, memory, shared memory, limits, permissions, names."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torchmpi_py.core import process_memory
from torchmpi_py.doctor import OK, PROBLEM, WARNING, Finding
from torchmpi_py.launch import topology

_MIB = 1 << 20
_ENOUGH_SHARED_BYTES, _LEAST_SHARED_BYTES = 512 * _MIB, 32 * _MIB
_BYTES_OF_A_RANK = 400 * _MIB  # memory of a rank with torch and its optimizers imported
_ENOUGH_FILES = 1024  # A rank opens tens of files, and torchmpirun opens a few per rank.
_ENOUGH_TEMPORARY_BYTES = 64 * _MIB
_LONGEST_FOLDER = 60  # The path of a socket has at most 107 characters, and Open MPI and PMIx append to TMPDIR.
_FIRST_PERSON = 1000  # Users with lower IDs are system accounts.
_PR_SET_PTRACER = 0x59616D61
_MORE_SHARED = "enlarge it to 512 MiB or more (for a container: docker run --shm-size=1g, or --ipc=host)"


def cores() -> Iterator[Finding]:
    """Report the physical cores that this process may use, considering its affinity and the quota of its cgroup."""
    cpus, there = os.sched_getaffinity(0), os.cpu_count() or 1
    num_cores = len(topology.cores(cpus))
    usable = topology.num_usable_cores(num_cores)
    limits = [f"{num_cores} physical cores have {len(cpus)} hardware threads"] if num_cores < len(cpus) else []
    limits += [f"the affinity allows {len(cpus)} of {there} hardware threads"] if len(cpus) < there else []
    limits += [f"a cgroup's quota allows the time of {usable}"] if usable < num_cores else []
    yield Finding(OK, "cores", ", ".join([f"{usable} usable", *limits]))


def memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Iterable[Path] | None = None) -> Iterator[Finding]:
    """Report whether there is enough memory for one rank per core. Tests pass ``cgroups`` instead of real folders."""
    free, limit = topology.free_memory(meminfo, cgroups)
    text = f"{free // _MIB} MiB free{limit}"
    num_needed = topology.num_usable_cores() * _BYTES_OF_A_RANK
    if free >= num_needed:
        yield Finding(OK, "memory", text)
    else:
        fit = max(1, free // _BYTES_OF_A_RANK)
        yield Finding(WARNING, "memory", f"{text}, but one rank per core needs {num_needed // _MIB} MiB", _fewer(fit))


def _fewer(fit: int) -> str:
    return f"start at most {fit} rank{'s' * (fit != 1)} (torchmpirun -n {fit}), or end other programs"


def shared_memory(folder: str = "/dev/shm") -> Iterator[Finding]:
    """Check the folder in which MPI creates shared memory. This package itself prefers files without a name (memfd)."""
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        yield Finding(PROBLEM, folder, "is missing or not writable", "mount a tmpfs there that every user can write")
        return
    status = os.statvfs(folder)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{free // _MIB} of {size // _MIB} MiB free"
    if size < _ENOUGH_SHARED_BYTES or free < _LEAST_SHARED_BYTES:
        is_full = size >= _ENOUGH_SHARED_BYTES
        remedy = f"end other programs, or remove files in {folder} that no process uses" if is_full else _MORE_SHARED
        yield Finding(PROBLEM if free < _LEAST_SHARED_BYTES else WARNING, folder, text, remedy)
    else:
        yield Finding(OK, folder, text)


def files() -> Iterator[Finding]:
    """Check the limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        yield Finding(OK, "open files", f"up to {soft}" if soft >= 0 else "no limit")
    else:
        most = hard if hard != resource.RLIM_INFINITY else _ENOUGH_FILES
        can_raise = most >= _ENOUGH_FILES
        remedy = f"run ulimit -n {_ENOUGH_FILES}" if can_raise else "ask an administrator to raise nofile (limits.conf)"
        yield Finding(WARNING, "open files", f"up to {soft}, which is not enough for many ranks", remedy)


def temporary_folder() -> Iterator[Finding]:
    """Check the folder for temporary files, in which launchers create sockets."""
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding(PROBLEM, "TMPDIR", str(error), "set TMPDIR to an existing folder in which you can create files")
        return
    setting, text = os.environ.get("TMPDIR") or folder, f"{folder}, {free // _MIB} MiB free"
    if os.path.abspath(setting) != folder:
        yield Finding(WARNING, "TMPDIR", f"{setting} is not writable", f"set a writable folder: export TMPDIR={folder}")
    elif len(folder) > _LONGEST_FOLDER:
        text = f"{folder} is long, so the paths of sockets in it may be too long for a launcher"
        yield Finding(WARNING, "TMPDIR", text, "set TMPDIR to a shorter path: export TMPDIR=/tmp")
    elif free < _ENOUGH_TEMPORARY_BYTES:
        yield Finding(PROBLEM, "TMPDIR", text, "delete files there, or set TMPDIR to a folder with more free space")
    else:
        yield Finding(OK, "TMPDIR", text)


def names() -> Iterator[Finding]:
    """Check this host's name and the loopback interface."""
    name = socket.gethostname()
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=5):
                pass
    except OSError as error:
        yield Finding(PROBLEM, "network", f"127.0.0.1 cannot be reached: {error}", "run ip link set lo up as root")
        return
    try:
        socket.getaddrinfo(name, 0)
        yield Finding(OK, "network", f"127.0.0.1 answers, and {name} has an address")
    except (OSError, UnicodeError):  # A part of the name with more than 63 characters raises UnicodeError.
        remedy = f"add this line to /etc/hosts: 127.0.1.1 {name}"
        yield Finding(WARNING, "network", f"the name of this host, {name}, has no address", remedy)


def users(processes: Path = Path("/proc")) -> Iterator[Finding]:
    """Report other users with processes on this host, because they can connect to a job's ports.

    The check ignores system accounts, and finds only processes that ``/proc`` shows to this user.
    """
    owners = set[int]()
    for process in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process may have ended.
            owners.add(process.stat().st_uid)
    others = []
    for owner in sorted(owners - {os.getuid()}):
        with contextlib.suppress(KeyError):
            account = pwd.getpwuid(owner)
            is_person = owner >= _FIRST_PERSON and not account.pw_shell.endswith(("nologin", "false"))
            others += [account.pw_name] * is_person
    if others:
        shown = ", ".join(others[:5]) + ", ..." * (len(others) > 5)
        text = f"other users of this host ({shown}) can connect to mpirun, and could prevent a job from ending"
        yield Finding(
            WARNING,
            "other users",
            text,
            "isolate each job that runs only on this host: "
            "unshare --user --map-current-user --net sh -c 'ip link set lo up && exec torchmpirun -n 4 train.py'",
        )
    else:
        yield Finding(OK, "other users", "no other user has visible processes here, except system accounts")


def permissions() -> Iterator[Finding]:
    """Check whether the kernel allows shared memory without a name, and reads of another process's memory."""
    if why := _attempt(_open_nameless):
        text = f"the kernel refuses files without a name (memfd: {why}), so shared memory uses /dev/shm"
        yield Finding(WARNING, "memfd", text, "in a container, allow memfd_create in the seccomp profile")
    else:
        yield Finding(OK, "memfd", "the kernel allows shared memory without a file name")
    if why := _attempt(_read_other_process):
        text = f"no process can read another process's memory ({why}), so large tensors are copied twice"
        remedy = "in a container, use docker run --cap-add SYS_PTRACE, or use symmetric tensors"
        yield Finding(WARNING, "ptrace", text, remedy)
    else:
        yield Finding(OK, "ptrace", "processes of one user can read each other's memory")


def _attempt(work: Callable[[], None]) -> str:
    """Return why ``work`` failed, or "" if it succeeded."""
    try:
        work()
    except (OSError, AttributeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _open_nameless() -> None:
    file = os.memfd_create("torchmpi_py")
    try:
        os.ftruncate(file, 4096)
        os.close(os.open(f"/proc/{os.getpid()}/fd/{file}", os.O_RDWR))
    finally:
        os.close(file)


def _read_other_process() -> None:
    """Let a child process read its parent's memory, as ranks read each other's memory. Raise OSError if it cannot."""
    source, read_end, write_end = ctypes.create_string_buffer(b"memory"), *os.pipe()
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()
    # The Linux security module Yama requires this call. Open MPI makes the same call.
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)
    child = os.fork()
    if not child:
        try:
            copy = ctypes.create_string_buffer(len(source))
            process_memory.read(parent, ctypes.addressof(source), ctypes.addressof(copy), len(source))
            os.write(write_end, b"\0")
        except OSError as error:
            os.write(write_end, bytes([(error.errno or 1) & 0xFF]))
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        code = (answer.read(1) or b"\1")[0]
    os.waitpid(child, 0)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
    if code:
        raise OSError(code, os.strerror(code))


CHECKS = (cores, memory, shared_memory, files, temporary_folder, names, users, permissions)
