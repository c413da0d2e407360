"""Where this rank is: its place on the node, its GPU, its share of the cores. Nothing here talks to other nodes.

Launchers tell the local rank in a variable of their own. It is needed before MPI starts (to choose the GPU), and it is
believed afterwards only if the ranks of the node hold 0, 1, 2, ... between them: Open MPI may count otherwise than
the shared-memory communicator does, and a variable may be left over from an outer job.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import TYPE_CHECKING

import torch

from torchmpi_py.launch import variables

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclasses.dataclass(frozen=True)
class Local:
    """Rank and size on the node, and the cores that each rank can count on."""

    rank: int
    size: int
    cores: int


def prepare_environment() -> None:
    """Settings that an MPI reads when it starts; the user's own win. torchmpirun makes the same ones for all ranks.

    A component of Open MPI's wheel that prints noise is left out. Ranks that fill the cores yield while they wait: on
    two cores that is 3 ms instead of 211 for Open MPI to reduce 1 MiB over TCP.
    """
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    if (variables.local_size(os.environ) or 1) >= len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "true")
        os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")


def locate(node: MPI.Comm) -> Local:
    """This rank's place among the ranks of its node. Collective over the node."""
    mine = (variables.local_rank(os.environ), tuple(sorted(os.sched_getaffinity(0))))
    told, cores = zip(*node.allgather(mine), strict=True)
    told_all = [rank for rank in told if rank is not None]
    rank = mine[0] if sorted(told_all) == list(range(node.size)) else None
    available = len(set().union(*cores))
    share = max(1, min(len(mine[1]), available // node.size))
    return Local(node.rank if rank is None else rank, node.size, share)


def limit_threads(local: Local) -> None:
    """Give torch this rank's share of the cores, unless OMP_NUM_THREADS or the program chose fewer."""
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > local.cores:
        torch.set_num_threads(local.cores)


def cuda_device() -> torch.device:
    """Pin this process to a GPU, round robin by local rank, before anything touches CUDA."""
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(
            f"start(with_cuda=True): torch {torch.__version__} sees no CUDA device "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); with_cuda=False runs on the CPU"
        )
    device = torch.device("cuda", (variables.local_rank(os.environ) or 0) % count)
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device, size: int, num_nodes: int) -> str:
    """The job in a line, as rank 0 sees it."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return (
        f"world of {size} (nodes: {num_nodes}), {vendor} {'.'.join(map(str, version))}, torch {torch.__version__}; "
        f"rank 0 is on {socket.gethostname()}, device {device}, threads {torch.get_num_threads()}"
    )
