"""Makes process groups for torch.distributed; the import prepares torch for them."""

from __future__ import annotations

from typing import Any

from torchmpi_py import communicators
from torchmpi_py.errors import TorchMPIError
from torchmpi_py.torch_backend import joining, meeting
from torchmpi_py.torch_backend.compiling import leave_alone
from torchmpi_py.torch_backend.messages import Message
from torchmpi_py.torch_backend.process_group import ProcessGroup
from torchmpi_py.torch_backend.work import Done, Pending, Several

leave_alone(ProcessGroup, Done, Pending, Several, Message)
joining.register()


def create(options: Any) -> ProcessGroup:
    """The process group that torch.distributed describes by ``options``. Collective over its ranks."""
    meeting.ensure_started(options.timeout)
    world = communicators.stack().levels[0]
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    place = (max(ranks, default=-1) < world.size) and ranks[options.group_rank] == world.rank
    if not place or (not options.global_ranks_in_group and options.group_size != world.size):
        raise TorchMPIError(
            f"torch.distributed was told that this is rank {options.group_rank} of {ranks}, but for MPI it is rank "
            f"{world.rank} of {world.size}. Launch with torchmpirun (not torchrun), and leave rank= and world_size= "
            "away, and RANK and WORLD_SIZE out of the environment"
        )
    return ProcessGroup(ranks, options.group_id, options.timeout)
