"""The cores that this process may use, with their sockets, NUMA nodes and hardware threads, and the cgroup limits.

The *allowed* CPUs are the CPUs on which the scheduler may run this process. Batch systems and containers limit them by
an affinity mask. A physical core has one or more CPUs, its hardware threads. The numbers of the CPUs do not show which
CPUs belong to a core or a socket, because machines differ. The two threads of a core may or may not have consecutive
numbers. The sockets may be numbered one after the other or alternately. So this module reads ``/sys/devices/system``.
If a container hides these files, each CPU counts as a core.

A container may also limit processor *time* (a cgroup quota) without limiting the cores. A quota reduces the number of
threads, but not the number of cores to which ranks are bound.
"""

import contextlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_DEVICES = Path("/sys/devices")
_CAPACITY = 1024  # Default capacity of a core if the system does not report it.
_SMALL = 0.8  # A core below this fraction of the largest capacity is a small core of a hybrid processor.


class Core(NamedTuple):
    """A physical core. Cores are sorted by NUMA node, then by socket, with small cores last in each socket."""

    node: int
    socket: int
    is_small: bool
    number: int  # the lowest number of the core's CPUs, even if this process may not use that CPU
    cpus: tuple[int, ...]  # the core's CPUs that this process may use


def cores(allowed: Collection[int] | None = None, devices: Path = _DEVICES) -> list[Core]:
    """Return the physical cores of the allowed CPUs (default: this process's CPUs), in the order of `Core`."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    system, atoms = devices / "system", _listed(devices / "cpu_atom/cpus")
    node_of = {cpu: int(path.name[4:]) for path in system.glob("node/node[0-9]*") for cpu in _listed(path / "cpulist")}
    threads, capacities = defaultdict(list), {}
    for cpu in sorted(allowed):
        folder = system / f"cpu/cpu{cpu}"
        first = min(_listed(folder / "topology/thread_siblings_list") or {cpu})
        threads[node_of.get(cpu, 0), _number(folder / "topology/physical_package_id"), first].append(cpu)
        # Linux may report the same capacity for all cores of a hybrid Intel processor. It lists the small cores in
        # cpu_atom, so halve the capacity of these cores.
        capacities[cpu] = (_number(folder / "cpu_capacity") or _CAPACITY) >> (cpu in atoms)
    least = _SMALL * max(capacities.values(), default=0)
    return sorted(
        Core(node, socket, capacities[cpus[0]] < least, first, tuple(cpus))
        for (node, socket, first), cpus in threads.items()
    )


def _text(path: Path) -> str:
    """Return the content of a file; empty if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _listed(path: Path) -> frozenset[int]:
    """Return the CPUs listed in a file, or an empty set if the file is missing or cannot be parsed."""
    with contextlib.suppress(ValueError):
        return read_cpus(_text(path))
    return frozenset()


def _number(path: Path) -> int:
    """Return the number in a file; 0 if there is no number."""
    with contextlib.suppress(ValueError):
        return int(_text(path))
    return 0


def read_cpus(text: str) -> frozenset[int]:
    """Return the CPUs in a list as Linux writes it, such as ``0-15,32-47``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def quota_cores(text: str) -> float:
    """Return the number of cores from a cgroup's ``quota period`` (in microseconds); infinite without a limit."""
    try:
        quota, period = text.split()
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except ValueError:  # "max 100000" or an empty text means no limit.
        return math.inf


def num_usable_cores(num_cores: int | None = None) -> int:
    """Return the number of cores whose time this process and its siblings may use.

    The result is the number of physical cores, or less if a cgroup has a quota. ``num_cores`` is the number of physical
    cores if the caller knows it (default: ``len(cores())``).
    """
    return max(1, min(num_cores or len(cores()), math.floor(_smallest_quota())))


def _smallest_quota() -> float:
    """Return the smallest quota of this process's cgroups, in cores.

    Without a quota the result is a large number, because math.floor needs a finite number.
    """
    quotas = [float(1 << 20)]
    for folder in cgroup_folders("cpu"):
        quota_of_version_1 = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        quotas.append(quota_cores(_text(folder / "cpu.max") or quota_of_version_1))
    return max(1.0, min(quotas))


def cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of all its parent cgroups, for cgroup versions 1 and 2.

    ``controller`` is the name of the controller in version 1.
    """
    folders: list[Path] = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / (controller if controllers else "")
        leaf = root / name.lstrip("/")
        folders += [leaf, *(parent for parent in leaf.parents if parent.is_relative_to(root))]
    return folders


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Iterable[Path] | None = None) -> tuple[int, str]:
    """Return the number of bytes that this process and its siblings may still use, and a text about the limit.

    The text is "" if the free memory of the host is the limit. ``cgroups`` contains the folders of the cgroups to read
    (default: the cgroups of this process).
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, limit = int(lines.get("MemAvailable", lines["MemFree"]).split()[0]) << 10, ""
    for folder in cgroup_folders("memory") if cgroups is None else cgroups:
        rest = _left_in(folder)
        if rest is not None and rest < free:
            free, limit = rest, " by a cgroup's limit"
    return free, limit


def _left_in(folder: Path) -> int | None:
    """Return the number of free bytes in a cgroup of version 1 or 2; None without a limit.

    Cached files count as free, because the kernel can drop them.
    """
    for most, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            limit, num_used = (folder / most).read_text().strip(), int((folder / usage).read_text())
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        return int(limit) - num_used + (int(cached[1]) if cached else 0) if limit.isdigit() else None
    return None
