"""Hosts and slots: read every common form of a list of hosts, and write the form that an MPI reads.

A *slot* is room for one rank. A hostfile has one host per line, in any of four forms that people carry from one MPI or
batch system to another. Everything after ``#`` is a comment::

    alpha
    beta slots=4        # Open MPI
    gamma:4             # MPICH, Intel MPI
    delta 4 all.q@delta UNDEFINED   # Grid Engine

A host that is named several times gets the sum of its slots, because a batch system writes `a`, `a` for two ranks.
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
    """A host by name or address, and its number of slots."""

    name: str
    num_slots: int = 1

    def __str__(self) -> str:
        """Return the form that `parse_host` reads."""
        return f"[{self.name}]:{self.num_slots}" if ":" in self.name else f"{self.name}:{self.num_slots}"


def parse_host(text: str, where: str) -> Host:
    """Parse a host (``name``, ``name:4``, ``name slots=4``); ``where`` names the source of ``text`` in an error."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise LaunchError(f"{where}: {text.strip()!r} is not a host; write `name`, `name:4` or `name slots=4`")
    num_slots = int(match["colon"] or match["slots"] or match["number"] or 1)
    if num_slots < 1:
        raise LaunchError(f"{where}: {text.strip()!r} has no slot for a rank; remove the host, or give it a slot")
    return Host(match["name"].strip("[]"), num_slots)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``a:2,b:2``."""
    return merge(parse_host(part, "--hosts") for part in text.split(","))


def read_hostfile(path: Path, option: str = "--hostfile", remedy: str = "") -> tuple[Host, ...]:
    """Return the hosts in a hostfile; ``option`` names the source of its path in an error."""
    try:
        # A line with a decoding error is refused as a host, so only a comment may hold bytes that are not UTF-8.
        content = trusted_files.read(path, _MOST_BYTES, owners=None, remedy="name a file of hosts")
        lines = content.decode(errors="replace").splitlines()
    except OSError as error:
        raise LaunchError(f"{option} {path}: {error.strerror}{remedy}") from error
    bare = [line.partition("#")[0].strip() for line in lines]
    hosts = merge(parse_host(line, f"{path}:{number}") for number, line in enumerate(bare, 1) if line)
    if not hosts:
        raise LaunchError(f"{option} {path} names no host{remedy}")
    return hosts


def merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return each host once, with the sum of its slots, in the order of first naming."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.num_slots
    return tuple(Host(name, num_slots) for name, num_slots in slots.items())


def is_this_host(host: str) -> bool:
    """Return whether the name stands for an address of this host."""
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
    """Return the hosts in an MPI's form; a form without ``{slots}`` gets one line per slot."""
    lines: list[str] = []
    for host in hosts:
        if ":" in host.name and "{name}:" in line:
            raise LaunchError(
                f"this MPI's hostfile cannot hold an IPv6 address ({host.name}): give the host a name, for example in "
                "/etc/hosts"
            )
        times = 1 if "{slots}" in line else host.num_slots
        lines += [line.format(name=host.name, slots=host.num_slots)] * times
    return "".join(f"{text}\n" for text in lines)


def num_ranks_on_busiest(hosts: tuple[Host, ...], num_ranks: int) -> int:
    """Return the number of ranks on the fullest host if slots are filled in proportion.

    Return ``num_ranks`` without hosts.
    """
    if not hosts:
        return num_ranks
    num_slots = sum(host.num_slots for host in hosts)
    rounds = -(-num_ranks // num_slots)
    return min(num_ranks, max(host.num_slots for host in hosts) * rounds)


def num_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs a program sees: by CUDA_VISIBLE_DEVICES if it is set, else by the driver."""
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
    """Return the output of a system program; "" if the program is missing or does not answer."""
    path = shutil.which(program, path=environment.get("PATH"))
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if path is not None:
            return subprocess.run([path, *words], capture_output=True, text=True, timeout=20, check=False).stdout
    return ""
