"""A cost model of each flavour: time = steps * alpha + bytes on the busiest link / beta + bytes copied / gamma.

*steps*    messages that follow one another
*alpha*    seconds of a step, *beta* bytes a second of a link in one direction, *gamma* bytes a second of a rank's
           memory: three numbers for each flavour, fitted (``fit.py``). Where ranks outnumber the cores, as on a bed of
           hosts that are one machine, a step waits until its rank is on a core: *crowded* takes the place of alpha

S bytes (of the larger tensor of a rank), M hosts, r ranks on each, P = M r. Of a verb with two ways the faster counts.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchmpi_py.bench.wire import floor_bytes

LEAST_CHUNK_BYTES, LARGEST_CHUNK_BYTES, CHUNKS_OF_A_SLICE = 64 << 10, 512 << 10, 4


class Cost(NamedTuple):
    """One way to carry out a verb."""

    steps: float
    link_bytes: float
    copied_bytes: float


class Parameters(NamedTuple):
    """Of a flavour; ``share`` is beta as a share of the link's rate."""

    alpha: float
    crowded: float
    share: float
    gamma: float

    def seconds(self, ways: Sequence[Cost], rate: float, *, is_crowded: bool = False) -> float:
        """The time of the fastest way, over links of ``rate`` bytes a second."""
        alpha = self.crowded if is_crowded else self.alpha
        return min(
            way.steps * alpha + way.link_bytes / (self.share * rate) + way.copied_bytes / self.gamma for way in ways
        )


def costs(flavour: str, verb: str, num_bytes: int, ranks_per_host: Sequence[int]) -> list[Cost]:
    """The ways of a verb; equal hosts."""
    return {"ring": _ring, "hierarchical": _hierarchical, "mpi": _mpi, "gloo": _gloo}[flavour](
        verb, num_bytes, ranks_per_host
    )


def _ring(verb: str, num_bytes: int, hosts: Sequence[int]) -> list[Cost]:
    size = sum(hosts)
    slice_bytes = num_bytes * (size - 1) / size
    if verb == "allreduce":  # flat: every rank sends to the next one, the last rank of a host over its link
        return [Cost(2 * (size - 1), 2 * slice_bytes, 3 * num_bytes)]
    if verb in ("reduce_scatter", "allgather"):
        return [Cost(size - 1, slice_bytes, (2 if verb == "reduce_scatter" else 1) * num_bytes)]
    if verb in ("broadcast", "reduce"):
        return _trees(size, num_bytes, (1 if verb == "broadcast" else 2) * num_bytes)
    return [Cost(size - 1, floor_bytes(verb, num_bytes, hosts), num_bytes)]


def _trees(size: int, num_bytes: int, copied_bytes: float) -> list[Cost]:
    """A chain, filled by its first chunks, or a binomial tree, as ``schedule.tree`` chooses."""
    chunk_bytes = min(max(num_bytes / CHUNKS_OF_A_SLICE, LEAST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)
    chunks, depth = max(1, math.ceil(num_bytes / chunk_bytes)), (size - 1).bit_length()
    if chunks + size - 2 < chunks * depth:
        return [Cost(size - 1, num_bytes * (chunks + size - 2) / chunks, copied_bytes)]
    return [Cost(depth, depth * num_bytes, copied_bytes)]


def _hierarchical(verb: str, num_bytes: int, hosts: Sequence[int]) -> list[Cost]:
    """As ring among the hosts; the tensors of the r ranks of a host pass through its memory before that and after."""
    num_hosts, ranks = len(hosts), hosts[0]
    inside = 0 if ranks == 1 else 2 * ranks * num_bytes
    return [
        way._replace(copied_bytes=way.copied_bytes / ranks + inside) for way in _ring(verb, num_bytes, [1] * num_hosts)
    ]


def _mpi(verb: str, num_bytes: int, hosts: Sequence[int]) -> list[Cost]:
    """The algorithms that Open MPI chooses from: by halves for small sizes, rings and chains for large ones."""
    depth = math.ceil(math.log2(sum(hosts)))
    ring = _ring(verb, num_bytes, hosts)[0]
    if verb in ("allreduce", "broadcast", "reduce"):
        crossing = math.ceil(math.log2(len(hosts)))  # steps whose messages leave the host
        return [Cost(depth, crossing * num_bytes * (hosts[0] if verb == "allreduce" else 1), num_bytes), ring]
    return [ring]


def _gloo(verb: str, num_bytes: int, hosts: Sequence[int]) -> list[Cost]:
    return _ring(verb, num_bytes, hosts)
