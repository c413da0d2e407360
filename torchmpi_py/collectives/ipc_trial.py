"""Whether ranks can use each other's GPU memory and events here: tried once, when the package starts.

Not every container or virtual machine lets processes do so, and there are machines where peers read wrong values.
"""

from __future__ import annotations

import logging

import torch

from torchmpi_py import cuda_ipc, gpus
from torchmpi_py.channels import Channel
from torchmpi_py.errors import CommunicatorError, Unavailable

logger = logging.getLogger("torchmpi_py")
NUM_BYTES = 1 << 16


def run(world: Channel, device: torch.device) -> None:
    """Let every IPC group try; where one cannot, it is switched off for all. Collective over ``world``."""
    if gpus.why_no_ipc():
        return
    group = world.split([gpus.group(place) for place in world.places])
    try:
        failure = _failure(group, device)
    except (Unavailable, CommunicatorError) as error:  # on all ranks of the group
        failure = str(error)
    group.free()
    failures = [text for text in world.mpi.allgather(failure) if text]
    if failures:
        gpus.switch_off(f"a trial with the peers' GPU memory failed: {failures[0]}")
        if world.rank == 0:
            logger.warning("flavour cudaipc is switched off: %s", gpus.why_no_ipc())


def _failure(group: Channel, device: torch.device) -> str:
    """What went wrong on this rank, or empty: each fills its memory, and reads that of all."""
    part, segment = cuda_ipc.allocate(group.mpi, group.places, NUM_BYTES, device, lambda segment: None)
    events = cuda_ipc.PeerEvents(group, device)
    part.fill_(_value(group.rank))
    events.record(cuda_ipc.READY)
    group.mpi.Barrier()
    events.follow(cuda_ipc.READY)
    try:
        views = [segment.view(place.local, torch.uint8, NUM_BYTES) for place in group.places]
        wrong = [rank for rank, view in enumerate(views) if not (view == _value(rank)).all()]
        failure = f"rank {group.rank} of {group.size} reads wrong values from {wrong}" if wrong else ""
    except RuntimeError as error:
        failure = str(error).partition("\n")[0]
    group.mpi.Barrier()  # before memory and events go
    return failure


def _value(rank: int) -> int:
    return rank % 255 + 1
