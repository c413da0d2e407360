"""Trials that find the fastest of several methods for a call while the program runs.

Which method is fastest can depend on facts that no table contains, such as whether the cores of two ranks share a
cache, or what else runs on the node. So the first calls of each kind and size alternate between the methods. Then the
ranks exchange their times, and choose the method with the shortest time on its slowest rank. After 250 calls they
repeat the trial, because the operating system may have moved the ranks to other cores.

The methods are used in a changing order (A B B A A B). With a fixed order, in a program that alternates between two
tensors, one method would always get the larger tensor.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence

from torchmpi_py.core.agree import AllGather

logger = logging.getLogger("torchmpi_py")
_TURNS = 3  # number of calls of each method in a trial; the fastest call counts
_HELD_CALLS = 250  # number of calls between two trials, so that trials of slower methods cost little


def num_calls(num_ways: int = 2) -> int:
    """Return the number of calls in a trial."""
    return _TURNS * num_ways


@dataclasses.dataclass
class Trial:
    """The state of a trial. All ranks have the same state, except for the times."""

    count: int = 0  # number of calls since the trial began
    chosen: int = 0
    seconds_per_byte: list[float] = dataclasses.field(default_factory=list)


class Trials:
    """The trials of a channel, one for each kind and size of call.

    All ranks must make the same calls in the same order.
    """

    def __init__(self, allgather: AllGather) -> None:
        self._allgather = allgather
        self._of: dict[Hashable, Trial] = {}

    def run(self, key: Hashable, num_bytes: int, ways: Sequence[Callable[[], None]]) -> None:
        """Carry out a call by one of the methods in ``ways``.

        All ranks must make this call with the same ``key``, ``num_bytes``, and order of methods.
        """
        trial = self._of.setdefault(key, Trial())
        turn, num_turns = trial.count, num_calls(len(ways))
        trial.count = (turn + 1) % (num_turns + _HELD_CALLS)
        if turn >= num_turns:
            ways[trial.chosen]()
            return
        if turn == 0:
            trial.seconds_per_byte = [math.inf] * len(ways)
        index = (turn + turn // len(ways)) % len(ways)
        begin = time.perf_counter()
        ways[index]()
        seconds = (time.perf_counter() - begin) / num_bytes
        trial.seconds_per_byte[index] = min(trial.seconds_per_byte[index], seconds)
        if turn == num_turns - 1:
            slowest = [max(times) for times in zip(*self._allgather(trial.seconds_per_byte), strict=True)]
            trial.chosen = slowest.index(min(slowest))
            logger.debug("%s: method %d is chosen; the methods take %s s per byte", key, trial.chosen, slowest)
