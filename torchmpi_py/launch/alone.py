"""Whether a rank has met the others of its job by the time it ends, as far as its own process shows.

It has if an MPI library is loaded, for mpi4py and this package load one no sooner than they start it, or if
torch.distributed has had a default group, or its RPC. A process that it has started may meet others in its place, and
leaves a mark (`marks.record_meeting`).
"""

import atexit
import contextlib
import os
import sys
from typing import Any

from torchmpi_py.launch import marks


def note_at_end(folder: str, rank: int) -> None:
    """Leave the mark ``alone-R`` in the job's folder when this process ends in order without having met anybody."""
    process_id = os.getpid()

    def note() -> None:
        with contextlib.suppress(Exception):
            if os.getpid() == process_id and not has_met():  # a forked child is not the rank
                marks.record_alone(folder, rank)

    atexit.register(note)


def explain(found: list[int]) -> str:
    """That these ranks did not meet the others."""
    names = ", ".join(map(str, found))
    who = f"ranks {names} each ran" if len(found) > 1 else f"rank {names} ran"
    return f"{who} the whole program alone: it called neither mpi.start() nor init_process_group()"


def has_met() -> bool:
    """Whether this process has met others."""
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    calls: Any = sys.modules.get("torch.distributed.rpc")
    has_grouped = getattr(groups, "_backend", None) is not None  # torch keeps it when the group is destroyed
    return has_grouped or getattr(calls, "_init_counter", 0) > 0 or _has_loaded_mpi()


def _has_loaded_mpi() -> bool:
    with open("/proc/self/maps") as maps:
        return any("/libmpi" in line for line in maps)
