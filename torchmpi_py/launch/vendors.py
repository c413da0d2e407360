"""The MPIs that torchmpirun can drive, one row each: what it is called, and what its options and variables are.

One row a vendor in `VENDORS`; adding one is adding a row. The rows share these decisions:

- The MPI binds nothing. `wrap` does, in every rank, because only there are the allowed cores of that host known.
- More ranks than slots is allowed: a laptop is where people try first.
- With as many ranks on a host as cores, or more, a waiting rank gives its core away (`busy_environment`). On 2 cores:
  4 ranks of MPICH need 81 us instead of 2 ms for a 4-byte allreduce, and 2 ranks of Open MPI over TCP 8 us instead of
  5 ms for a ping-pong.
- Options go through the environment where they can, for a user's own setting then wins.
- The environment reaches other hosts: Open MPI is told the names, the others pass everything on.

Open MPI refuses to run as root unless told twice. A container's only user is root, so torchmpirun, which changes
nothing of the system, tells it; the daemons of Open MPI 5 (PRRTE) ask a second time under their own names.
"""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

Options = tuple[str, ...]
_PATIENCE = "-o ConnectTimeout=20"


@dataclass(frozen=True)
class Vendor:
    """One MPI. In the options ``{n}``, ``{path}``, ``{name}`` and ``{agent}`` stand for what the user asks for."""

    name: str
    programs: Options
    version: str  # a regular expression that the output of --version contains
    abi: str  # what mpi4py calls it; "" where the starter does not say which MPI the ranks use
    libraries: Options  # where its library lies, seen from the folder of its programs
    start: Options
    hostfile: Options
    hostfile_line: str
    forward: Options = ()  # repeated for each name; without {name}: once
    agent: Options = ()
    elastic: Options = ()
    no_input: Options = ()  # for one that never tells rank 0 that its standard input is empty
    hostfile_variable: str = ""
    interpreted: str = ":"  # a regular expression of words that it takes for its own, also among a program's arguments
    stop_signals: tuple[int, ...] = ()  # what ends it, where Ctrl-C and SIGTERM themselves do not
    environment: Mapping[str, str] = field(default_factory=dict)
    busy_environment: Mapping[str, str] = field(default_factory=dict)
    root_environment: Mapping[str, str] = field(default_factory=dict)
    ssh_environment: Mapping[str, str] = field(default_factory=dict)  # give a host that does not answer up
    shared_bytes: int = 0  # what a rank needs in /dev/shm, without which it cannot start


VENDORS = (
    Vendor(
        name="intel",
        programs=("mpirun", "mpiexec", "mpiexec.hydra"),
        version=r"Intel\(R\) MPI Library",
        abi="impi",
        libraries=("../lib/libmpi.so.12", "../lib/release/libmpi.so.12"),
        start=("-n", "{n}"),
        hostfile=("-machinefile", "{path}"),
        hostfile_line="{name}:{slots}",
        forward=("-genvall",),
        agent=("-bootstrap", "ssh", "-bootstrap-exec", "{agent}"),
        environment={"I_MPI_PIN": "0"},
        busy_environment={"I_MPI_THREAD_YIELD": "2"},
    ),
    Vendor(
        name="openmpi",
        programs=("mpirun", "mpiexec"),
        version=r"Open MPI|OpenRTE",
        abi="openmpi",
        libraries=("../lib/libmpi.so.40",),
        start=("-n", "{n}", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
        hostfile=("--hostfile", "{path}"),
        hostfile_line="{name} slots={slots}",
        forward=("-x", "{name}"),
        agent=("--prtemca", "plm_ssh_agent", "{agent}"),
        elastic=("--with-ft", "ulfm"),
        no_input=("--stdin", "none"),
        interpreted=":|--?(bind-to|map-by|rank-by|runtime-options|personality|[a-z]*mca)",
        environment={"OMPI_MCA_osc": "^ucx"},  # this component prints noise where there is no InfiniBand
        busy_environment={"OMPI_MCA_mpi_yield_when_idle": "true"},
        root_environment={
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        ssh_environment={"PRTE_MCA_plm_ssh_args": _PATIENCE},
    ),
    Vendor(
        name="mpich",
        programs=("mpiexec.hydra", "mpiexec", "mpirun"),
        version=r"HYDRA",
        abi="mpich",
        libraries=("../lib/libmpi.so.12",),
        start=("-n", "{n}", "-bind-to", "none"),
        hostfile=("-f", "{path}"),
        hostfile_line="{name}:{slots}",
        agent=("-launcher", "ssh", "-launcher-exec", "{agent}"),
        busy_environment={"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
        ssh_environment={"HYDRA_LAUNCHER_EXTRA_ARGS": _PATIENCE},
        shared_bytes=6 << 20,  # measured: 5.4 MB
    ),
    Vendor(
        name="srun",
        programs=("srun",),
        version=r"slurm",
        abi="",
        libraries=(),
        start=("--mpi=pmix", "--ntasks={n}", "--cpu-bind=none", "--kill-on-bad-exit=1"),
        hostfile=("--distribution=arbitrary",),  # one line a rank, in the file that the variable names
        hostfile_line="{name}",
        forward=("--export=ALL",),
        hostfile_variable="SLURM_HOSTFILE",
        stop_signals=(signal.SIGTERM, signal.SIGTERM),  # SIGINT makes it print how its tasks are
    ),
)


def vendor_named(name: str) -> Vendor:
    """The row of that name."""
    return next(vendor for vendor in VENDORS if vendor.name == name)


def recognise(version: str) -> Vendor | None:
    """The vendor whose --version output this is. Intel's is a hydra too, so its row comes first."""
    return next((vendor for vendor in VENDORS if re.search(vendor.version, version)), None)
