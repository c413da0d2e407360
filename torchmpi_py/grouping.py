"""Which rank lands where when ranks are grouped by a key: arithmetic without MPI."""

from __future__ import annotations

import dataclasses
import re
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


def in_words(ranks: Sequence[int]) -> str:
    """``0-3,5``: those that follow each other as a range."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def from_words(text: str) -> list[int]:
    """The ranks of ``0-3,5``; what cannot be read is left out."""
    parts = [part.partition("-") for part in text.split(",") if re.fullmatch(r"\d+(-\d+)?", part)]
    return [rank for begin, _, end in parts for rank in range(int(begin), int(end or begin) + 1)]
