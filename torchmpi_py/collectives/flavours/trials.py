"""Which of several ways to the same result is the fastest here: found by the program's own calls.

Which way wins can depend on what no table knows: whether the cores of two ranks share a cache, what else runs on the
node. So calls alike take turns with the ways; the ranks exchange their times, take the way whose slowest rank was the
fastest, and try again after some hundred calls, for the machine may have moved the ranks. The order changes from turn
to turn (A B B A A B), so that no way always meets the larger tensors of a program that alternates between two.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence

from torchmpi_py.core.agree import AllGather

logger = logging.getLogger("torchmpi_py")
_TURNS = 3  # of each way in a trial; the best one counts
_HELD_CALLS = 250  # between trials: the slower ways cost little then


def num_calls(num_ways: int = 2) -> int:
    """The calls after which a trial is over."""
    return _TURNS * num_ways


@dataclasses.dataclass
class Trial:
    """What is known of calls alike: equal on all ranks, but for the time of each way."""

    count: int = 0  # of calls since the trial began
    chosen: int = 0
    seconds_per_byte: list[float] = dataclasses.field(default_factory=list)


class Trials:
    """The trials of a channel, by what the calls have in common. All ranks make the same calls in the same order."""

    def __init__(self, allgather: AllGather) -> None:
        self._allgather = allgather
        self._of: dict[Hashable, Trial] = {}

    def run(self, key: Hashable, num_bytes: int, ways: Sequence[Callable[[], None]]) -> None:
        """Go one of the ways. All but the ways themselves is equal on all ranks. Collective."""
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
            logger.debug("%s: way %d of those that take %s s a byte", key, trial.chosen, slowest)
