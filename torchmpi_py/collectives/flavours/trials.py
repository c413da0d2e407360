"""Which of several ways to the same result is the fastest here: found by the program's own calls.

Which way wins can depend on what no table knows: whether the cores of two ranks share a cache, what else runs on the
node. So calls alike take turns with the ways; the ranks exchange their times, take the way whose slowest rank was the
fastest, and try again after some hundred calls, for the machine may have moved the ranks.
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
_HELD_CALLS = 500  # between trials: the slower ways cost little then


@dataclasses.dataclass
class Trial:
    """What is known of calls alike: equal on all ranks, but for the ``seconds`` of each way."""

    num_calls: int = 0  # since the trial began
    chosen: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)


class Trials:
    """The trials of a channel, by what the calls have in common. All ranks make the same calls in the same order."""

    def __init__(self, allgather: AllGather) -> None:
        self._allgather = allgather
        self._of: dict[Hashable, Trial] = {}

    def run(self, key: Hashable, ways: Sequence[Callable[[], None]]) -> None:
        """Go one of the ways. ``key``, and the number of ways, are equal on all ranks. Collective."""
        trial = self._of.setdefault(key, Trial())
        turn, num_turns = trial.num_calls, _TURNS * len(ways)
        trial.num_calls = (turn + 1) % (num_turns + _HELD_CALLS)
        if turn >= num_turns:
            ways[trial.chosen]()
            return
        if turn == 0:
            trial.seconds = [math.inf] * len(ways)
        index = turn % len(ways)
        begin = time.perf_counter()
        ways[index]()
        trial.seconds[index] = min(trial.seconds[index], time.perf_counter() - begin)
        if turn == num_turns - 1:
            slowest = [max(times) for times in zip(*self._allgather(trial.seconds), strict=True)]
            trial.chosen = slowest.index(min(slowest))
            logger.debug("%s: way %d of those that take %s s", key, trial.chosen, slowest)
