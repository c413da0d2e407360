"""The command that starts an attempt of a job, and the environment of mpirun and the ranks."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import (
    allocation,
    binding,
    group_of_ranks,
    hosts,
    mpirun,
    surroundings,
    terminal,
    timeline_file,
    topology,
    transports,
    variables,
    wrap,
)
from torchmpi_py.launch.job_spec import NETWORKS, JobSpec
from torchmpi_py.launch.mpirun import Options

# This process may be a rank of another job. The ranks must inherit neither its rank variables, nor the variable that
# prevents child processes of a rank from starting MPI.
_DROPPED = ("PMIX_", "PMI_", "OMPI_COMM_", "OMPI_ARGV", "OMPI_COMMAND", "PRTE_LAUNCHED", "HYDI_", "MPI_LOCAL")
_DROPPED_WHOLE = ("TORCHMPI_STARTED_PID", group_of_ranks.VARIABLE, timeline_file.VARIABLE, variables.LAYOUT)
_KEPT = ("PMIX_MCA_",)
FORWARDED = (
    "TORCHMPI",
    "MPI4PY_",
    "OMPI_MCA_",
    "PYTHONPATH",
    variables.ADDRESS,
    variables.PORT,
    "GLOO_",
    "NCCL_",
    "UCX_",
    *binding.THREAD_VARIABLES,
)
"""Prefixes of the variables that must be set for ranks on other hosts, in addition to the variables of --env."""


@dataclass(frozen=True)
class StarterCommand:
    """The command of an attempt, and its environment. --dry-run prints ``words`` and ``added``."""

    words: list[str]
    environment: Mapping[str, str]
    added: Mapping[str, str]  # The part of the environment that torchmpirun adds.
    hostfile: str = ""  # Content of the file ``hostfile`` in the job's folder.
    forwarded: tuple[str, ...] = ()  # Names of variables that are forwarded to other hosts.
    hands_input: bool = False  # Whether rank 0 gets the standard input from torchmpirun, not from mpirun.


def build(spec: JobSpec, folder: Path, attempt: int = 0) -> StarterCommand:
    """Return the command of an attempt whose files are in ``folder``; do not write any file.

    ``attempt`` is the number of earlier attempts of this torchmpirun.
    """
    hostfile = folder / "hostfile" if spec.hosts and spec.system != "Slurm" else None
    num_here = hosts.num_ranks_on_busiest(spec.hosts, spec.num_ranks)
    surroundings.raise_open_files(num_here)
    inherited = inherited_environment(spec.environment)
    settings = _settings(
        spec, folder, inherited, is_busy=len(spec.hosts) > 1 or num_here >= topology.num_usable_cores()
    )
    # A value that the user has set takes precedence.
    settings = {name: value for name, value in settings.items() if name not in inherited}
    if hostfile is not None and spec.vendor.hostfile_variable:
        settings[spec.vendor.hostfile_variable] = str(hostfile)
    settings |= allocation.slurm_layout(spec.hosts, spec.environment)
    settings |= {
        "TORCHMPIRUN_JOB_DIR": str(folder),
        "TORCHMPIRUN_RESTART": str(spec.restart + attempt),
        variables.RECORD: variables.record_for_ranks([(host.name, host.num_slots) for host in spec.hosts], folder),
    }
    added = settings | {name: value for name, value in spec.variables.items() if inherited.get(name) != value}
    reaching = sorted({*spec.variables, *(name for name in inherited | added if name.startswith(FORWARDED))})
    # If rank 0 certainly runs on this host, hand the input directly to rank 0. Otherwise mpirun must forward the input,
    # although Open MPI loses the end of the input if there is a hostfile.
    hands_input = terminal.has_input() and not (spec.mpi_args or spec.has_srun)
    hands_input = hands_input and all(map(hosts.is_this_host, spec.host_names))
    words = starter_words(spec, hostfile, reaching, no_input=hands_input or not terminal.has_input())
    return StarterCommand(
        [spec.starter, *words, *rank_words(spec)],
        inherited | added,
        added,
        hosts.render(spec.hosts, spec.vendor.hostfile_line) if hostfile is not None else "",
        tuple(reaching),
        hands_input,
    )


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without variables that would confuse the ranks."""
    return {
        name: value
        for name, value in transports.without_ours(variables.without_outer(environment)).items()
        if name not in _DROPPED_WHOLE and (name.startswith(_KEPT) or not name.startswith(_DROPPED))
    }


def _settings(spec: JobSpec, folder: Path, inherited: Mapping[str, str], *, is_busy: bool) -> dict[str, str]:
    """Return the variables that the MPI needs.

    ``is_busy`` is True if the ranks use all cores of a host, or if there are several hosts.
    """
    vendor = spec.vendor
    settings = dict(vendor.environment)
    if is_busy:
        settings |= vendor.busy_environment
    if os.geteuid() == 0:
        settings |= vendor.root_environment
    if spec.hosts and not (spec.launch_agent or spec.has_srun):
        settings |= vendor.ssh_environment
    if vendor.folder_variable and not mpirun.has_folder(spec.starter, spec.mpi_args, {**inherited, **spec.variables}):
        settings[vendor.folder_variable] = str(folder)
    if spec.interface:
        settings |= dict.fromkeys(("GLOO_SOCKET_IFNAME", *vendor.interface_variables), spec.interface)
        settings |= {"NCCL_SOCKET_IFNAME": f"={spec.interface}", "UCX_NET_DEVICES": _ucx_device(spec.interface)}
    return settings | mpirun.library_of(vendor, spec.starter)


def _ucx_device(interface: str) -> str:
    """Return UCX's name for a network interface: its RDMA device and port, or ``interface`` without an RDMA device."""
    place = NETWORKS / interface
    device, port = next((place / "device" / "infiniband").glob("*"), None), place / "dev_port"
    return f"{device.name}:{int(port.read_text()) + 1}" if device is not None and port.exists() else interface


def starter_words(
    spec: JobSpec, hostfile: Path | None = None, forwarded: list[str] | None = None, *, no_input: bool = False
) -> list[str]:
    """Return the options of mpirun, without the program mpirun and the command of the ranks."""
    vendor = spec.vendor
    options = vendor.start
    if hostfile is not None:
        options += vendor.hostfile
    if spec.launch_agent:
        options += _offered(spec, vendor.agent, "--launch-agent")
    if spec.interface:
        options += vendor.interface
    if spec.elastic:
        options += _offered(spec, vendor.elastic, "--elastic")
    values = {"n": spec.num_ranks, "srun_mpi": spec.srun_mpi, "path": hostfile}
    words = [option.format(**values, agent=spec.launch_agent, interface=spec.interface) for option in options]
    names = forwarded or () if "{name}" in vendor.forward else [""]
    words += [option.format(name=name) for name in names for option in vendor.forward]
    return [*words, *(vendor.no_input if no_input else ()), *spec.mpi_args]


def _offered(spec: JobSpec, options: Options, flag: str) -> Options:
    if not options:
        raise LaunchError(f"{spec.vendor.name} does not support {flag}; choose another MPI with --mpi, or omit {flag}")
    return options


def rank_words(spec: JobSpec) -> list[str]:
    """Return the command of a rank, with quoted arguments if mpirun would otherwise change them."""
    words = [sys.executable, wrap.__file__, "--bind", spec.bind]
    for option, folder in (("--log-dir", spec.log_dir), ("--profile", spec.profile)):
        words += [option, str(folder.absolute())] if folder is not None else []
    program = list(spec.program)
    if wrap.needs_quotes(program, spec.vendor.interpreted):
        words.append("--quoted")
        program = wrap.quote(program, spec.vendor.interpreted)
    return [*words, *["-m"] * spec.as_module, *program]
