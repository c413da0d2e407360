"""Which rank holds which elements of a parameter server: plain arithmetic."""

from __future__ import annotations

import itertools

Bounds = tuple[int, int]  # begin, end


def shards(count: int, size: int) -> list[Bounds]:
    """``count`` elements over ``size`` ranks in order, as equal as can be: the first ``count % size`` get one more.

    There may be fewer elements than ranks. TorchMPI's layout (reference 5.2).
    """
    least, more = divmod(count, size)
    begins = [least * rank + min(more, rank) for rank in range(size + 1)]
    return list(itertools.pairwise(begins))
