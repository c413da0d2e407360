"""The cores that this process may use, as the system reports them: sockets, NUMA nodes, threads, a quota.

The *allowed* CPUs are those on which the scheduler may run this process (an affinity mask, as batch systems and
containers set it). A physical core has one or more CPUs, its hardware threads. Linux numbers CPUs in different orders:
the second threads after all first threads or next to them, sockets one after the other or alternately. So the numbers
mean nothing, and the files of ``/sys/devices/system`` are read. If a container hides these files, each CPU counts as a
core.

A container may also limit processor *time* (a cgroup quota) without naming cores. Such a quota limits the number of
threads, but not the cores.
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
_CAPACITY = 1024  # capacity of a core, if the system does not report it
_SMALL = 0.8  # fraction of the largest capacity; a core below it is a small core of a hybrid processor


class Core(NamedTuple):
    """A physical core. Cores are ordered by NUMA node, then by socket; small cores come last."""

    node: int
    socket: int
    is_small: bool
    number: int  # the lowest of its CPUs, whether this process may use it or not
    cpus: tuple[int, ...]  # its hardware threads that this process may use


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
        # Linux may report the same capacity for all cores of a hybrid Intel processor, but it lists the small ones.
        capacities[cpu] = (_number(folder / "cpu_capacity") or _CAPACITY) >> (cpu in atoms)
    least = _SMALL * max(capacities.values(), default=0)
    return sorted(
        Core(node, socket, capacities[cpus[0]] < least, first, tuple(cpus))
        for (node, socket, first), cpus in threads.items()
    )


def _text(path: Path) -> str:
    """Return the content of a file; empty if the system does not have the file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _listed(path: Path) -> frozenset[int]:
    """Return the CPUs that a file lists."""
    with contextlib.suppress(ValueError):
        return read_cpus(_text(path))
    return frozenset()


def _number(path: Path) -> int:
    """Return the number in a file; 0 if there is no number."""
    with contextlib.suppress(ValueError):
        return int(_text(path))
    return 0


def read_cpus(text: str) -> frozenset[int]:
    """Read a list of CPUs in the system's form ``0-15,32-47``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def quota_cores(text: str) -> float:
    """Read a cgroup's ``quota period`` (microseconds) as a number of cores; infinite without a limit."""
    try:
        quota, period = text.split()
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except ValueError:  # "max 100000" or empty text means no limit
        return math.inf


def num_usable_cores(num_cores: int | None = None) -> int:
    """Return how many cores' worth of time this process and its siblings may use.

    This is the number of physical cores, or less under a cgroup quota. num_cores: the number for this process if it is
    known; default: ``len(cores())``.
    """
    return max(1, min(num_cores or len(cores()), math.floor(_smallest_quota())))


def _smallest_quota() -> float:
    """Return the smallest quota of this process's cgroups, in cores.

    Without a limit the result is a large number, because math.floor needs a finite one.
    """
    quotas = [float(1 << 20)]
    for folder in cgroup_folders("cpu"):
        quota_of_version_1 = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        quotas.append(quota_cores(_text(folder / "cpu.max") or quota_of_version_1))
    return max(1.0, min(quotas))


def cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of its ancestors, for cgroup version 2 and 1.

    ``controller`` names the controller of version 1.
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
    """Return the bytes that this process and its siblings may still use, and the limit's name if it is not RAM."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, limit = int(lines.get("MemAvailable", lines["MemFree"]).split()[0]) << 10, ""
    for folder in cgroup_folders("memory") if cgroups is None else cgroups:
        rest = _left_in(folder)
        if rest is not None and rest < free:
            free, limit = rest, " by a cgroup's limit"
    return free, limit


def _left_in(folder: Path) -> int | None:
    """Return the free bytes of a cgroup of either version; None without a limit.

    Cached files count as free, because the system can drop them.
    """
    for most, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            limit, num_used = (folder / most).read_text().strip(), int((folder / usage).read_text())
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        return int(limit) - num_used + (int(cached[1]) if cached else 0) if limit.isdigit() else None
    return None
