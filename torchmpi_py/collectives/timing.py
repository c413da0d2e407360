"""Times of alternatives that are called alternately.

Because the calls alternate, other load on the machine slows all alternatives equally, so the ratios of their times are
valid within a run. The autotuner and the bench measure only with these functions. Measuring the alternatives one after
the other would be simpler, but the load changes from second to second.

A call on GPU tensors returns when its work has been queued. ``until_done`` wraps the call so that it returns when the
work is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from torchmpi_py.core.mpi_api import MPI

_BeforeAndCall = tuple[Callable[[], object], Callable[[], object]]


def interleaved(
    comm: MPI.Comm,
    functions: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    min_turns: int,
    max_turns: int,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Call each function once per turn, and return the times of its calls in seconds, one per turn, in order.

    Every rank of ``comm`` must call this, with the same names in the same order, and gets the same times. A barrier
    precedes each call, and the slowest rank determines the time of a call. After one untimed turn, the first timed turn
    determines how many turns fill about ``seconds`` (rank 0 decides), within ``min_turns`` and ``max_turns``. The order
    of the functions changes from turn to turn, so that no function always follows the same other function. Before the
    barrier, the function of the same name in ``before`` is called untimed, to choose or warm buffers.

    Raise ValueError unless 1 <= min_turns <= max_turns. An exception from a function propagates. The other ranks
    then wait for this rank, so the exception must end the job.
    """
    if not 1 <= min_turns <= max_turns:
        raise ValueError(f"interleaved: min_turns={min_turns}, max_turns={max_turns}; pass 1 <= min_turns <= max_turns")
    calls = [((before or {}).get(name, _nothing), function) for name, function in functions.items()]
    _turn(comm, calls, 0)
    begin = time.perf_counter()
    turns = [_turn(comm, calls, 0)]
    affordable = seconds / (time.perf_counter() - begin)
    num_turns = comm.bcast(int(min(max(affordable, min_turns), max_turns)))
    turns += [_turn(comm, calls, turn) for turn in range(1, num_turns)]
    times = np.array(turns, dtype=np.float64)
    slowest = np.empty_like(times)
    comm.Allreduce(times, slowest, MPI.MAX)
    return {name: column.tolist() for name, column in zip(functions, slowest.T, strict=True)}


def until_done(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return ``call``; for a GPU, a function that also waits until the GPU has completed all work of this process."""
    if device.type == "cpu":
        return call

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize(device)

    return call_and_wait


def order(num_functions: int, turn: int) -> list[int]:
    """Return the order of ``num_functions`` functions in a turn: a zigzag 0, 1, -1, 2, -2, ... shifted by the turn.

    Within ``2 * num_functions`` turns every function follows every other function equally often (a Williams square).
    """
    zigzag = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(num_functions)]
    if turn // max(1, num_functions) % 2:
        zigzag.reverse()
    return [(place + turn) % num_functions for place in zigzag]


def _turn(comm: MPI.Comm, calls: Sequence[_BeforeAndCall], turn: int) -> list[float]:
    """Call each function once, in the order of the turn, and return the times on this rank."""
    times = [0.0] * len(calls)
    for index in order(len(calls), turn):
        before, call = calls[index]
        before()
        comm.Barrier()
        begin = time.perf_counter()
        call()
        times[index] = time.perf_counter() - begin
    return times


def _nothing() -> None:
    """Do nothing: the default for functions that have no entry in ``before``."""
