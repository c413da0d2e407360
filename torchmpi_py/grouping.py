"""Which rank lands where when ranks are grouped by a key: arithmetic without MPI."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Where one rank of the parent lands when all ranks gave their keys: colours and ranks for two MPI splits."""

    inner_colour: int
    inner_rank: int
    outer_colour: int
    outer_rank: int
    is_cartesian: bool


def group_by_key(keys: Sequence[Hashable], rank: int, want_cartesian: bool) -> Grouping:
    """The grouping of ``rank`` for the ``keys`` of ranks 0, 1, ... of the parent; groups count by their lowest rank."""
    groups: dict[Hashable, list[int]] = {}
    for member, key in enumerate(keys):
        groups.setdefault(key, []).append(member)
    mine = groups[keys[rank]]
    inner_rank = mine.index(rank)
    is_cartesian = want_cartesian and len({len(group) for group in groups.values()}) == 1
    linked = is_cartesian or inner_rank == 0
    return Grouping(
        inner_colour=mine[0],
        inner_rank=inner_rank,
        outer_colour=inner_rank if linked else len(keys) + rank,
        outer_rank=list(groups).index(keys[rank]),
        is_cartesian=is_cartesian,
    )
