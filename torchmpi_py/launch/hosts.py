"""Hosts and slots: read every usual form, write the one an MPI wants.

A *slot* is room for one rank. A hostfile has one host a line, in any of four forms that people carry from one MPI or
batch system to another, and everything after ``#`` is a comment::

    alpha
    beta slots=4        # Open MPI
    gamma:4             # MPICH, Intel MPI
    delta 4 all.q@delta UNDEFINED   # Grid Engine

A host named several times has the sum of its slots, as `a`, `a` means two ranks in a file made by a batch system.
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

_MOST_BYTES = 1 << 24  # of a hostfile


@dataclass(frozen=True)
class Host:
    """A host, by name or address, and the number of ranks it has room for."""

    name: str
    num_slots: int = 1

    def __str__(self) -> str:
        """As `parse_host` reads it."""
        return f"[{self.name}]:{self.num_slots}" if ":" in self.name else f"{self.name}:{self.num_slots}"


def parse_host(text: str, where: str) -> Host:
    """Read one host in any form; `where` says in an error what the text came from."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise LaunchError(f"{where}: {text.strip()!r} is not a host; write `name`, `name:4` or `name slots=4`")
    num_slots = int(match["colon"] or match["slots"] or match["number"] or 1)
    if num_slots < 1:
        raise LaunchError(f"{where}: {text.strip()!r} leaves no room for a rank; drop the host, or give it a slot")
    return Host(match["name"].strip("[]"), num_slots)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``a:2,b:2``."""
    return merge(parse_host(part, "--hosts") for part in text.split(","))


def read_hostfile(path: Path, option: str = "--hostfile", remedy: str = "") -> tuple[Host, ...]:
    """Read a hostfile in any of the forms; ``option`` says in an error what has named it."""
    try:
        # Errors of decoding are those of the line: only a comment may hold what is not UTF-8.
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
    """Add up the slots of hosts named more than once, in the order of their first naming."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.num_slots
    return tuple(Host(name, num_slots) for name, num_slots in slots.items())


def is_this_host(host: str) -> bool:
    """Whether the name stands for an address of this host."""
    bare = host.rpartition("@")[2].strip("[]")
    try:
        found = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)
    except OSError:
        return bare == socket.gethostname()
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as trying:
                trying.bind(address)
        except OSError:
            continue
        return True
    return False


def render(hosts: Iterable[Host], line: str) -> str:
    """Write hosts in an MPI's form; a form without ``{slots}`` has one line a slot."""
    lines: list[str] = []
    for host in hosts:
        if ":" in host.name and "{name}:" in line:
            raise LaunchError(
                f"this MPI's list of hosts has no room for an IPv6 address ({host.name}): give the host a name, in "
                "/etc/hosts for instance"
            )
        times = 1 if "{slots}" in line else host.num_slots
        lines += [line.format(name=host.name, slots=host.num_slots)] * times
    return "".join(f"{text}\n" for text in lines)


def num_ranks_on_busiest(hosts: tuple[Host, ...], num_ranks: int) -> int:
    """Ranks on the fullest host when slots are filled in proportion; all of them when no host is named."""
    if not hosts:
        return num_ranks
    num_slots = sum(host.num_slots for host in hosts)
    rounds = -(-num_ranks // num_slots)
    return min(num_ranks, max(host.num_slots for host in hosts) * rounds)


def num_gpus(environment: Mapping[str, str]) -> int:
    """GPUs this host shows to a program: CUDA_VISIBLE_DEVICES if set, else what the driver lists."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA stops at the first entry that is not a device, so "-1" and "" mean none.
        devices = [device.strip() for device in visible.split(",")]
        return next((i for i, device in enumerate(devices) if not device or device.startswith("-")), len(devices))
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return len(os.listdir(driver))
    return sum(line.startswith("GPU ") for line in output_of(environment, "nvidia-smi", "-L").splitlines())


def output_of(environment: Mapping[str, str], program: str, *words: str) -> str:
    """What a program of the system prints; "" where there is no such program, or no answer."""
    path = shutil.which(program, path=environment.get("PATH"))
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if path is not None:
            return subprocess.run([path, *words], capture_output=True, text=True, timeout=20, check=False).stdout
    return ""
