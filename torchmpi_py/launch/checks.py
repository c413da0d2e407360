"""Checks before a job starts, of the program, the folders and the shared memory of this host."""

import os
import re
import sys
import tempfile
from pathlib import Path

from torchmpi_py import trusted_files
from torchmpi_py.errors import LaunchError
from torchmpi_py.launch.mpirun import Vendor
from torchmpi_py.launch.terminal import say

_TRIED_BYTES = 4096  # one block of a disk


def check_working_folder() -> None:
    """Raise LaunchError if the working folder was removed or cannot be entered, because no MPI can start there."""
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(f"cannot use the working folder: {error.strerror}; change to another folder") from None


def check_program(program: str) -> None:
    """Raise LaunchError if ``program`` is not a Python file or a folder that a rank could run."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(program)):
        raise LaunchError(f"omit {program}: torchmpirun runs every rank with {sys.executable}")
    if not os.path.exists(program):
        raise LaunchError(f"{program}: this program does not exist; check its path")
    if not (os.path.isfile(program) or os.path.isdir(program)):
        raise LaunchError(f"{program} is a named pipe, a device or a socket; pass a Python file")


def check_output_folder(option: str, folder: Path | None, replaced: str = "") -> None:
    """Create an output folder, and remove the file ``replaced`` in it. Raise LaunchError if this is not possible."""
    if folder is None:
        return
    files = "files"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIED_BYTES))
        if replaced:
            files = replaced
            trusted_files.refuse_others(folder / replaced)
            (folder / replaced).unlink(missing_ok=True)
    except OSError as error:
        problem = f"{option} {folder}: cannot write {files} there: {error.strerror}"
        raise LaunchError(f"{problem}; choose a writable folder, or free space there") from None


def check_shared_memory(vendor: Vendor, num_ranks: int, folder: str = "/dev/shm") -> None:
    """Raise LaunchError if this host has no writable /dev/shm; warn if /dev/shm is too small for the ranks."""
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise LaunchError(f"{vendor.name} needs a writable {folder}; mount a tmpfs there, or use --mpi openmpi")
    needed, free = vendor.shared_bytes * num_ranks, os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < needed:
        say(
            f"{folder} has {free >> 20} MiB free, but {vendor.name} needs {needed >> 20} MiB for -n {num_ranks}: ranks "
            f"may crash (signal 7); enlarge {folder} (docker run --shm-size=1g), or use --mpi openmpi"
        )
