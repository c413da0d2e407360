"""From times to choices: at which sizes another flavour is better than the one before.

Going up in size, another flavour is chosen where it beats the one chosen before by more than 5 %, in the first half of
the turns and in the second, so that noise does not make stripes. A choice ends at the geometric mean of the sizes on
both sides of the change.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from torchmpi_py.collectives.registry import FLAVOURS
from torchmpi_py.collectives.selector import Choice

Times = Mapping[str, Sequence[float]]  # of each flavour, in seconds, turn by turn
Point = tuple[int, Times]  # how many bytes take these times

_DISPLACES_BY = 1.05
_HOPELESS = 8.0
_DROP_FROM_BYTES = 256 << 10  # before that the slow ones cost little, and one that is slow to start may yet win


def choose(points: Sequence[Point]) -> list[Choice]:
    """The choices that follow from times at growing sizes; a flavour without a time at a size is out of the race."""
    winners: list[str] = []
    for _, times in points:
        best = min(times, key=lambda name: statistics.median(times[name]))
        stays = winners and not _displaces(times, best, winners[-1])
        winners.append(winners[-1] if stays else best)
    runs = [
        (winner, [point for point, _ in run])
        for winner, run in itertools.groupby(zip(points, winners, strict=True), key=lambda pair: pair[1])
    ]
    limits = [math.sqrt(run[-1][0] * after[0][0]) for (_, run), (_, after) in itertools.pairwise(runs)]
    return [
        Choice(limit if limit == math.inf else round(limit), winner, _why(winner, run[len(run) // 2]))
        for limit, (winner, run) in zip([*limits, math.inf], runs, strict=True)
    ]


def beyond(choices: Sequence[Choice], largest_bytes: int, former: Sequence[Choice]) -> list[Choice]:
    """The choices, with what the former ones had changed to beyond the largest size that was measured."""
    begins = [-1.0, *(choice.max_bytes for choice in former)]
    kept = [(begin, choice) for begin, choice in zip(begins, former, strict=False) if begin >= largest_bytes]
    if not kept or kept[0][1].flavour == choices[-1].flavour:
        return list(choices)
    return [*choices[:-1], choices[-1]._replace(max_bytes=kept[0][0]), *(choice for _, choice in kept)]


def _displaces(times: Times, challenger: str, holder: str) -> bool:
    """Whether the challenger is clearly faster: a load that comes or goes meanwhile does not decide."""
    if holder not in times:
        return True
    half = (len(times[holder]) + 1) // 2
    return all(
        statistics.median(times[holder][part]) > _DISPLACES_BY * statistics.median(times[challenger][part])
        for part in (slice(half), slice(-half, None))
    )


def _why(winner: str, point: Point) -> str:
    num_bytes, times = point
    medians = {name: statistics.median(turns) for name, turns in times.items()}
    others = sorted(
        (name for name in times if name != winner), key=lambda name: (name != FLAVOURS[0].name, medians[name])
    )
    if not others:
        return "the only one in the race"
    return f"{medians[others[0]] / medians[winner]:.1f}x {others[0]} at {in_units(num_bytes)}, measured"


def is_hopeless(name: str, points: Sequence[Point]) -> bool:
    """Whether it took so much longer than the best at the last two sizes that going on wastes time."""
    recent = [times for num_bytes, times in points[-2:] if num_bytes >= _DROP_FROM_BYTES]
    return len(recent) == 2 and all(
        statistics.median(times[name]) > _HOPELESS * min(map(statistics.median, times.values())) for times in recent
    )


def in_units(num_bytes: float) -> str:
    """A size in words."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} B"
