"""Who works on which elements, and when: plain arithmetic, tested for 1 to 37 ranks inside one process.

*slice*   the part of a tensor that one rank owns in a reduction
*chunk*   a piece of a tensor that is worked on at a time, so that it stays in cache or fits in a buffer
*tick*    the time between two meetings of all ranks in a pipeline
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

ALIGNMENT = 64  # elements: two ranks never write into one cache line

Bounds = tuple[int, int]  # begin, end


@functools.lru_cache(maxsize=1024)
def slices(count: int, size: int) -> tuple[Bounds, ...]:
    """``count`` elements cut into ``size`` slices in order, as equal as the alignment lets them be."""
    blocks = -(-count // ALIGNMENT)
    ends = [min(count, blocks * (rank + 1) // size * ALIGNMENT) for rank in range(size)]
    return tuple(zip([0, *ends], ends, strict=False))


def chunks(begin: int, end: int, step: int) -> list[Bounds]:
    """The range cut into pieces of ``step`` elements; the last one may be shorter."""
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


def pipeline(num_chunks: int, stages: Sequence[Callable[[int], None]], meet: Callable[[], None]) -> None:
    """Take every chunk through all stages: in tick t stage s works on chunk t - s; ranks meet after each tick.

    What a stage leaves in one of two alternating buffers (chunk modulo 2) is read by the next stage one tick later, and
    overwritten one tick after that. num_chunks + len(stages) - 1 ticks: ranks meet also for no chunks at all.
    """
    for tick in range(num_chunks + len(stages) - 1):
        for depth, stage in enumerate(stages):
            if 0 <= tick - depth < num_chunks:
                stage(tick - depth)
        meet()
