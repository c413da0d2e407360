"""Cores of 24 machines as Linux shows them in /sys/devices, and what each rank gets there."""

from typing import NamedTuple

import pytest
from support import jobs

from torchmpi_py.launch import binding, topology


class Machine(NamedTuple):
    """Files of /sys/devices: lists of CPUs, as Linux writes them."""

    sockets: list[str]
    nodes: list[str] | None = None  # of memory; those without CPUs too; default: as the sockets; []: no such files
    siblings: int = 0  # the distance between the hardware threads of a core; 0: each CPU is a core
    threads: int = 2  # of a core
    small: str = ""  # CPUs of the small cores
    allowed: str = ""  # default: all


def even(first, last):
    """Return every second CPU, as Dell numbers the CPUs of a socket."""
    return ",".join(map(str, range(first, last + 1, 2)))


XEON_8358 = Machine(["0-31,64-95", "32-63,96-127"], siblings=64)
DELL = Machine([even(0, 62), even(1, 63)], siblings=32)
NPS4 = [f"{16 * node}-{16 * node + 15},{128 + 16 * node}-{143 + 16 * node}" for node in range(8)]
EPYC_7742 = Machine(["0-63,128-191", "64-127,192-255"], NPS4, 128)
EPYC_9654 = ["0-95,192-287", "96-191,288-383"]
PHI = ["0-33,68-101,136-169,204-237", "34-67,102-135,170-203,238-271"]
A64FX = ["12-23", "24-35", "36-47", "48-59"]
SNC4 = [f"{14 * node}-{14 * node + 13},{112 + 14 * node}-{125 + 14 * node}" for node in range(8)]

MACHINES = {  # name: the machine, --bind, what each rank gets
    "one core": (Machine(["0"]), "core", ["0"]),
    "one core, two ranks": (Machine(["0"]), "core", ["0", "0"]),
    "Raspberry Pi 4": (Machine(["0-3"], []), "core", ["0", "1", "2-3"]),
    "Core i7-8550U": (Machine(["0-7"], siblings=4), "core", ["0-1,4-5", "2-3,6-7"]),
    "Core i7-8550U, a rank per thread": (Machine(["0-7"], siblings=4), "core", list("04152637")),
    "Azure D8s v3": (Machine(["0-7"], siblings=1), "core", ["0-3", "4-7"]),
    "Core i5-1240P": (Machine(["0-15"], siblings=1, small="8-15"), "core", ["0-3,8-11", "4-7,12-15"]),
    "Core i9-13900K": (Machine(["0-31"], siblings=1, small="16-31"), "core", ["0-7,16-23", "8-15,24-31"]),
    "RK3588": (Machine(["0-7"], [], small="0-3"), "core", ["0-1,4-5", "2-3,6-7"]),
    "a guest with a socket per CPU": (Machine(list("0123"), ["0,2", "1,3"]), "numa", ["0,2", "1,3"]),
    "2 x Xeon 6130, threads off": (Machine([even(0, 30), even(1, 31)]), "core", [even(0, 30), even(1, 31)]),
    "2 x Xeon 6130": (DELL, "core", [even(0, 14) + "," + even(32, 46), even(16, 30) + "," + even(48, 62),
                                     even(1, 15) + "," + even(33, 47), even(17, 31) + "," + even(49, 63)]),
    "2 x Xeon 6130, --bind socket": (DELL, "socket", [even(0, 62), even(0, 62), even(1, 63), even(1, 63)]),
    "2 x Xeon 8358": (XEON_8358, "core", ["0-31,64-95", "32-63,96-127"]),
    "2 x Xeon 8358, three ranks": (XEON_8358, "core", ["0-20,64-84", "21-41,85-105", "42-63,106-127"]),
    "2 x Xeon 8358, a task of Slurm": (XEON_8358._replace(allowed="8-15,72-79"), "core", ["8-11,72-75", "12-15,76-79"]),
    "2 x Xeon 8358, first threads only": (XEON_8358._replace(allowed="0-3"), "core", ["0-1", "2-3"]),
    "2 x EPYC 7742, NPS4": (EPYC_7742, "core", NPS4),
    "2 x EPYC 7742, --bind numa": (EPYC_7742, "numa", [f"{NPS4[2 * r]},{NPS4[2 * r + 1]}" for r in range(4)]),
    "2 x EPYC 9654": (Machine(EPYC_9654, siblings=192), "core", EPYC_9654),
    "2 x Xeon Max 9480, SNC4": (Machine(["0-55,112-167", "56-111,168-223"], SNC4 + [""] * 8, 112), "numa", SNC4),
    "2 x POWER9": (Machine(["0-87", "88-175"], siblings=1, threads=4), "core", ["0-43", "44-87", "88-131", "132-175"]),
    "A64FX": (Machine(["12-59"], [""] * 4 + A64FX), "numa", A64FX),
    "Xeon Phi 7250": (Machine(["0-271"], ["0-271", ""], 68, 4), "core", PHI),
    "Grace": (Machine(["0-71"], ["0-71", *[""] * 8]), "core", ["0-17", "18-35", "36-53", "54-71"]),
}  # fmt: skip


@pytest.fixture
def cores_of(tmp_path):
    """Write the files of a machine, and return its cores as they are read."""

    def read(machine):
        cpus = topology.read_cpus(",".join(machine.sockets))
        step, small = machine.siblings, topology.read_cpus(machine.small) if machine.small else frozenset()
        for socket, text in enumerate(machine.sockets):
            for cpu in topology.read_cpus(text):
                base = min(cpus)
                first = cpu
                if step == 1 and cpu not in small:
                    first = base + (cpu - base) // machine.threads * machine.threads
                elif step > 1:
                    first = base + (cpu - base) % step
                threads = range(first, first + step * machine.threads, step) if step and cpu not in small else [cpu]
                folder = f"system/cpu/cpu{cpu}"
                jobs.write(tmp_path, ",".join(map(str, threads)) + "\n", f"{folder}/topology/thread_siblings_list")
                jobs.write(tmp_path, f"{socket}\n", f"{folder}/topology/physical_package_id")
                if small:  # Arm tells the capacity; Intel lists the small cores, and has one capacity
                    jobs.write(tmp_path, f"{530 if cpu in small and not step else 1024}\n", f"{folder}/cpu_capacity")
        if small and step:
            jobs.write(tmp_path, f"{machine.small}\n", "cpu_atom/cpus")
        for node, text in enumerate(machine.sockets if machine.nodes is None else machine.nodes):
            jobs.write(tmp_path, f"{text}\n", f"system/node/node{node}/cpulist")
        return topology.cores(topology.read_cpus(machine.allowed) if machine.allowed else cpus, tmp_path)

    return read


def parts_of(cores, how, num_ranks):
    """Return what each rank gets."""
    return [binding.bound_cores(how, cores, rank, num_ranks)[0] for rank in range(num_ranks)]


def cpus_of(cores):
    """Return the CPUs of cores."""
    return {cpu for core in cores for cpu in core.cpus}


@pytest.mark.parametrize("name", MACHINES)
def test_what_each_rank_gets(cores_of, name):
    machine, how, expected = MACHINES[name]
    cores = cores_of(machine)
    parts = parts_of(cores, how, len(expected))
    assert [cpus_of(part) for part in parts] == [topology.read_cpus(text) for text in expected]
    for num_ranks in {1, 2, 3, 7, 13, 24, len(cores)} & {*range(len(cores) + 1)}:
        parts = parts_of(cores, "core", num_ranks)
        assert sorted(core for part in parts for core in part) == cores
        assert min(map(len, parts)) >= 1
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_that_share_a_domain_share_its_threads(cores_of):
    cores = cores_of(XEON_8358)
    assert [binding.bound_cores("socket", cores, rank, 3)[1] for rank in range(3)] == [16, 16, 32]
    assert binding.bound_cores("socket", cores, 0, 1)[1] == 64


def test_gpus_are_near_nodes_in_any_order(cores_of):
    """A DGX A100: GPUs 0 and 1 are near node 3, 2 and 3 near node 1, 4 and 5 near node 7, 6 and 7 near node 5."""
    near = [topology.read_cpus(NPS4[node]) for node in (3, 3, 1, 1, 7, 7, 5, 5)]
    cores = cores_of(EPYC_7742)
    parts = [binding.cores_of_rank(cores, rank, 8, near) for rank in range(8)]
    halves = [(48, 55), (56, 63), (16, 23), (24, 31), (112, 119), (120, 127), (80, 87), (88, 95)]
    assert [cpus_of(part) for part in parts] == [
        {*range(first, last + 1), *range(first + 128, last + 129)} for first, last in halves
    ]


def test_where_a_container_hides_the_files_each_cpu_is_a_core(tmp_path):
    assert [core.cpus for core in topology.cores([3, 1, 2], tmp_path)] == [(1,), (2,), (3,)]
    assert 1 <= topology.num_usable_cores() <= len(topology.cores())
