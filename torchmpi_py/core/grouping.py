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


def in_words(ranks: Sequence[int], *, strides: bool = False) -> str:
    """``0-3,5``: those that follow each other as a range; with ``strides`` also every second, ...: ``0-8/2``."""
    parts: list[list[int]] = []
    for rank in ranks:
        last = parts[-1] if parts else []
        continues = rank - last[-1] == last[1] - last[0] if len(last) > 1 else bool(last) and rank == last[0] + 1
        if continues or (strides and len(last) == 1 and rank > last[0]):
            last.append(rank)
        elif strides and len(last) == 2 and last[1] - last[0] > 1:
            parts[-1:] = [last[:1], [last[1], rank] if rank > last[1] else [last[1]]]
            parts += [] if rank > last[1] else [[rank]]
        else:
            parts.append([rank])
    return ",".join(_run_in_words(part) for part in parts)


def _run_in_words(run: Sequence[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    step = run[1] - run[0]
    if step > 1 and len(run) == 2:
        return f"{run[0]},{run[1]}"
    return f"{run[0]}-{run[-1]}" + (f"/{step}" if step > 1 else "")


def from_words(text: str) -> list[int]:
    """The ranks of ``0-3,5`` and ``0-8/2``; what cannot be read is left out."""
    found = (re.fullmatch(r"(\d+)(?:-(\d+)(?:/([1-9]\d*))?)?", part) for part in text.split(","))
    parts = [match.groups() for match in found if match]
    return [rank for begin, end, step in parts for rank in range(int(begin), int(end or begin) + 1, int(step or 1))]
