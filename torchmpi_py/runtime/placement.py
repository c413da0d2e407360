"""The placement of a rank: its place on the node, its GPU, and its share of the cores.

Each launcher sets the local rank in its own environment variable. Before MPI starts, this variable determines the GPU.
Afterwards the variable counts only if its values on the ranks of the node are 0, 1, 2, and so on, in any order. (Open
MPI may number the ranks in another order than the shared-memory communicator.) Otherwise the variable may be left over
from an outer job, and the rank in the shared-memory communicator counts. This module does not communicate with other
nodes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket

import torch

from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import TorchMPIError
from torchmpi_py.launch import cleanup, surroundings, topology, transports, variables

logger = logging.getLogger("torchmpi_py")
_ABORT_DELAYS = ("opal_abort_delay", "mpi_abort_delay")  # two names for one setting


@dataclasses.dataclass(frozen=True)
class Local:
    """The place of a rank on its node.

    ``cores`` is this rank's share of the ``node_cores`` cores that the ranks of the node may use. ``gpu_rank`` modulo
    the number of GPUs is the index of this rank's GPU.
    """

    rank: int
    size: int
    cores: int
    node_cores: int
    gpu_rank: int


def prepare_environment() -> None:
    """Set the environment variables that MPI reads when it starts, unless the user has set them.

    torchmpirun sets the same variables. If the ranks use all cores, or wait for other hosts, they yield while they
    wait: on two cores, Open MPI then reduces 1 MiB over TCP in 3 ms instead of 211 ms. Under srun and on several hosts,
    a rank that loses its connection to a dead rank delays its abort, so that the launcher reports the death first.
    Otherwise the job would end with the exit code of that abort.
    """
    surroundings.set_home()
    for name, value in variables.OPEN_MPI.items():
        os.environ.setdefault(name, value)
    transports.leave_tcp_out()
    if not transports.is_chosen("btl"):
        # Exclude the component ofi, which is only for one-sided messages and takes a second to start.
        os.environ[transports.COMPONENTS] = "^ofi"
    size, local_size = variables.size_in(os.environ) or 1, variables.local_size_in(os.environ) or 1
    cores = variables.number(os.environ.get(variables.CORES, "")) or topology.num_usable_cores()
    if local_size < size or local_size >= cores:
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "true")
        os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")
    if (local_size < size or variables.is_srun(os.environ)) and not transports.is_chosen(*_ABORT_DELAYS):
        os.environ[f"OMPI_MCA_{_ABORT_DELAYS[0]}"] = "1"  # seconds


def check_world(size: int) -> None:
    """Raise TorchMPIError if the launcher started several ranks but MPI sees each of them as a world of one."""
    launched = variables.size_in(os.environ) or 1
    if size == 1 and launched > 1:
        vendor, version = MPI.get_vendor()
        for name in cleanup.shared_memory([os.getpid()]):
            # Neither Open MPI nor srun removes this file of a world of one.
            if "/sm_segment." in name:
                os.unlink(name)
        raise TorchMPIError(
            f"the launcher started {launched} ranks, but MPI sees each as a separate job: mpi4py has loaded {vendor} "
            f"{'.'.join(map(str, version))}, but the launcher may belong to another MPI. Start with torchmpirun, unset "
            "MPI4PY_LIBMPI and MPI4PY_MPIABI, install only one MPI, or pass the right --mpi to srun; to run separate "
            "jobs on purpose, unset "
            f"{' and '.join(name for name in variables.SIZE if name in os.environ)}"
        )


def locate(node: MPI.Comm) -> Local:
    """Return this rank's place among the ranks of its node. All ranks of the node must make this call."""
    mine = (variables.local_rank_in(os.environ), [core.number for core in topology.cores()])
    claims, cores = zip(*node.allgather(mine), strict=True)
    claimed = [rank for rank in claims if rank is not None]
    rank = mine[0] if sorted(claimed) == list(range(node.size)) else None
    available = len(set().union(*cores))
    share = max(1, min(len(mine[1]), available // node.size))
    # If each rank is in its own container, each looks like a separate node. The local ranks from the launcher still
    # differ, so they determine the GPUs.
    gpu_rank = mine[0] if mine[0] is not None and len(set(claimed)) == node.size else node.rank
    return Local(node.rank if rank is None else rank, node.size, share, available, gpu_rank)


def limit_threads(local: Local) -> None:
    """Limit torch's threads to this rank's share of the cores, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > local.cores:
        torch.set_num_threads(local.cores)


def cuda_device() -> torch.device:
    """Pin this process to a GPU, round robin by local rank, and return the device.

    Make this call before any use of CUDA, including the start of MPI. If no launcher has set the local rank, the device
    has no index, and the process is not pinned until MPI supplies the local rank (``corrected_device``).
    CUDA_VISIBLE_DEVICES limits and numbers the GPUs.
    """
    count = _num_gpus()
    local_rank = variables.local_rank_in(os.environ)
    return torch.device("cuda") if local_rank is None else _pin(local_rank % count)


def corrected_device(device: torch.device, local: Local) -> torch.device:
    """Return the device of this rank for its place ``local``, and pin the process if the device is a GPU.

    ``device`` is the choice that was made before MPI started.
    """
    if device.type != "cuda":
        return device
    index = local.gpu_rank % _num_gpus()
    if device.index == index:
        return device
    if device.index is not None:
        logger.info("the launcher's local rank is wrong: it chose %s, and this rank now uses cuda:%d", device, index)
    return _pin(index)


def _pin(index: int) -> torch.device:
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _num_gpus() -> int:
    count = torch.cuda.device_count()
    if count == 0:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ValueError(
            f"start(with_cuda=True): torch {torch.__version__} ({built}) sees no CUDA device "
            f"(CUDA_VISIBLE_DEVICES{' is not set' if visible is None else f'={visible!r}'}); "
            "to run on the CPU, pass with_cuda=False"
        )
    return count


def describe(device: torch.device, size: int, num_nodes: int) -> str:
    """Return the line about the job that rank 0 logs at the start."""
    vendor, version = MPI.get_vendor()
    alone = "" if size > 1 else "; to use several ranks, run torchmpirun -n 4 program.py"
    return (
        f"world of {size} (nodes: {num_nodes}), {vendor} {'.'.join(map(str, version))}, torch {torch.__version__}; "
        f"rank 0 is on {socket.gethostname()}, device {device}, threads {torch.get_num_threads()}{alone}"
    )
