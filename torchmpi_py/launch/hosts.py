"""Hosts and slots: read every common form of a list of hosts, and write the form that an MPI reads.

A *slot* is a place for one rank. A hostfile has one host per line, in any of the four forms that MPIs and batch systems
use. Everything after ``#`` is a comment::

    alpha
    beta slots=4        # Open MPI
    gamma:4             # MPICH, Intel MPI
    delta 4 all.q@delta UNDEFINED   # Grid Engine

If a host occurs several times, its slots are added, because a batch system writes `a`, `a` for two ranks.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmpi_py import trusted_files
from torchmpi_py.errors import LaunchError

_FORM = re.compile(
    r"""(?P<name> \[[0-9A-Fa-f:.]+\] | [A-Za-z0-9_][\w.-]*(?:@[\w.-]+)? )   # a name, or an IPv6 address in brackets
        (?: :(?P<colon>\d{1,18}) | \s+slots\s*=\s*(?P<slots>\d{1,18}) | \s+(?P<number>\d{1,18})\s+\S+\s+\S+ )?
        (?: \s+max[-_]slots\s*=\s*\d+ )? """,
    re.VERBOSE,
)

_MOST_BYTES = 1 << 24  # size limit of a hostfile


@dataclass(frozen=True)
class Host:
    """The name or address of a host, and its number of slots."""

    name: str
    num_slots: int = 1

    def __str__(self) -> str:
        """Return the host in the form that `parse_host` reads."""
        return f"[{self.name}]:{self.num_slots}" if ":" in self.name else f"{self.name}:{self.num_slots}"


def parse_host(text: str, where: str) -> Host:
    """Return the host in a text (``name``, ``name:4``, ``name slots=4``).

    Raise LaunchError if ``text`` is not a host. The message begins with ``where``, the source of the text.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise LaunchError(f"{where}: {text.strip()!r} is not a host; write `name`, `name:4` or `name slots=4`")
    num_slots = int(match["colon"] or match["slots"] or match["number"] or 1)
    if num_slots < 1:
        raise LaunchError(f"{where}: {text.strip()!r} has 0 slots; remove the host, or set at least 1 slot")
    return Host(match["name"].strip("[]"), num_slots)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in the value of --hosts, such as ``a:2,b:2``."""
    return merge(parse_host(part, "--hosts") for part in text.split(","))


def read_hostfile(path: Path, option: str = "--hostfile", remedy: str = "; use another hostfile") -> tuple[Host, ...]:
    """Return the hosts in a hostfile.

    Raise LaunchError if the file cannot be read or lists no hosts. The message begins with ``option``, which shows
    where the path came from, and ends with ``remedy``.
    """
    try:
        # A host with a decoding error is rejected later, so only comments may contain bytes that are not UTF-8.
        content = trusted_files.read(path, _MOST_BYTES, owners=None, remedy="check the path")
        lines = content.decode(errors="replace").splitlines()
    except OSError as error:
        raise LaunchError(f"{option} {path}: {error.strerror}{remedy}") from error
    bare = [line.partition("#")[0].strip() for line in lines]
    hosts = merge(parse_host(line, f"{path}:{number}") for number, line in enumerate(bare, 1) if line)
    if not hosts:
        raise LaunchError(f"{option} {path} lists no hosts{remedy}")
    return hosts


def merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return the hosts without duplicates, each with the sum of its slots, in the order of first occurrence."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.num_slots
    return tuple(Host(name, num_slots) for name, num_slots in slots.items())


def is_this_host(host: str) -> bool:
    """Return whether ``host`` is a name or an address of this host."""
    bare = host.rpartition("@")[2].strip("[]")
    try:
        addresses = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)
    except OSError:
        return bare == socket.gethostname()
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as trying:
                trying.bind(address)
        except OSError:
            continue
        return True
    return False


def render(hosts: Iterable[Host], line: str) -> str:
    """Return the content of a hostfile whose lines have the form ``line``.

    If ``line`` does not contain ``{slots}``, the result has one line per slot. Raise LaunchError if this form cannot
    express an IPv6 address.
    """
    lines: list[str] = []
    for host in hosts:
        if ":" in host.name and "{name}:" in line:
            raise LaunchError(
                f"this MPI's hostfile cannot contain an IPv6 address ({host.name}); list the host by a name, for "
                "example from /etc/hosts"
            )
        times = 1 if "{slots}" in line else host.num_slots
        lines += [line.format(name=host.name, slots=host.num_slots)] * times
    return "".join(f"{text}\n" for text in lines)


def num_ranks_on_busiest(hosts: tuple[Host, ...], num_ranks: int) -> int:
    """Return the largest number of ranks on a host, or ``num_ranks`` if ``hosts`` is empty.

    If there are more ranks than slots, assume that each host gets a multiple of its slots.
    """
    if not hosts:
        return num_ranks
    num_slots = sum(host.num_slots for host in hosts)
    rounds = -(-num_ranks // num_slots)
    return min(num_ranks, max(host.num_slots for host in hosts) * rounds)


def num_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs that a program sees, from CUDA_VISIBLE_DEVICES if it is set, else from the driver."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA stops at the first entry that is not a device, so "-1" and "" mean no GPU.
        devices = [device.strip() for device in visible.split(",")]
        return next((i for i, device in enumerate(devices) if not device or device.startswith("-")), len(devices))
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return len(os.listdir(driver))
    return sum(line.startswith("GPU ") for line in output_of(environment, "nvidia-smi", "-L").splitlines())


def output_of(environment: Mapping[str, str], program: str, *words: str) -> str:
    """Return the output of a system program; "" if the program is missing or does not end in time."""
    path = shutil.which(program, path=environment.get("PATH"))
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if path is not None:
            return subprocess.run([path, *words], capture_output=True, text=True, timeout=20, check=False).stdout
    return ""
