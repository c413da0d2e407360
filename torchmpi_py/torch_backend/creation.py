"""Makes process groups for torch.distributed; the import prepares torch for them."""

from __future__ import annotations

import os
from typing import Any

from torchmpi_py import communicators
from torchmpi_py.errors import TorchMPIError
from torchmpi_py.launch import variables
from torchmpi_py.torch_backend import joining, meeting
from torchmpi_py.torch_backend.compiling import leave_alone
from torchmpi_py.torch_backend.messages import Message
from torchmpi_py.torch_backend.process_group import ProcessGroup
from torchmpi_py.torch_backend.work import Done, Pending, Several

leave_alone(ProcessGroup, Done, Pending, Several, Message)
joining.register()


def create(options: Any) -> ProcessGroup:
    """The process group that torch.distributed describes by ``options``. Collective over its ranks."""
    is_default = not options.global_ranks_in_group
    if is_default and not communicators.is_started():
        _check_is_whole(options, variables.size(os.environ) or 1)  # before this rank waits for the others to start
    meeting.ensure_started(options.timeout)
    world = communicators.stack().levels[0]
    if is_default:
        _check_is_whole(options, world.size)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if max(ranks, default=-1) >= world.size or ranks[options.group_rank] != world.rank:
        raise TorchMPIError(
            f"torch.distributed was told that this is rank {options.group_rank} of {ranks}, but for MPI it is rank "
            f"{world.rank} of {world.size}. Launch with torchmpirun (not torchrun), and leave rank= and world_size= "
            "away, and RANK and WORLD_SIZE out of the environment"
        )
    if is_default:
        meeting.wait_for_all(world, options.timeout)
    return ProcessGroup(ranks, options.group_id, options.timeout)


def _check_is_whole(options: Any, size: int) -> None:
    """TorchMPIError if the default group is to have fewer ranks than MPI has."""
    if options.group_size < size:
        raise TorchMPIError(
            f"the default group was asked for with {options.group_size} ranks, and MPI has started {size}: it has to "
            'have them all. Call dist.init_process_group("torchmpi") on every rank, without rank= and world_size=; a '
            "group of some ranks is then made by dist.new_group(ranks), which all ranks call too"
        )
