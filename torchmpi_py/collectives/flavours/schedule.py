"""Who works on which elements, and when: plain arithmetic on integers, tested for 1 to 37 ranks inside one process.

*slice*   the part of a tensor that one rank owns
*chunk*   a piece of a tensor or of a slice that is worked on at a time, so that it stays in cache or fits in a buffer
          or a message; ``Bounds`` (begin, end), which may be empty
*tick*    in a pipeline, the time between two meetings of all ranks

In the plans of flavour ring, which say who sends which elements to whom:

*round*   the chunks with one number, one of each slice, on their way through the ranks; no round waits for another
*step*    a rank's work at a time in a round: post one message to a rank and one from a rank, wait for both, and use
          what came. Bounds sent count in the memory sent from, bounds received in the memory received into; of empty
          bounds there is no message
*tree*    who passes on to whom between the root and all others: a *chain*, where every rank has one child, or
          a *binomial* tree, where every rank that has the data at some time gives it to one more
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

T = TypeVar("T")
ALIGNMENT = 64  # elements: two ranks never write into one cache line

Bounds = tuple[int, int]  # begin, end
NOTHING: Bounds = (0, 0)
broken_off: list[object] = []  # what errors have left of messages under way


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


class Step(NamedTuple):
    """Send to rank ``to`` what lies within ``sent``; receive from rank ``source`` what belongs within ``received``."""

    to: int
    sent: Bounds
    source: int
    received: Bounds


class Tree(NamedTuple):
    """One rank's neighbours: ``parent`` towards the root (None there), and ``children``, that of most ranks first."""

    parent: int | None
    children: list[int]


def rounds(bounds: Sequence[Bounds], step: int) -> Iterator[list[Bounds]]:
    """Round k: elements k * step to (k + 1) * step of every slice, empty for slices that have ended by then."""
    longest = max(end - begin for begin, end in bounds)
    for at in range(0, longest, step):
        yield [(min(begin + at, end), min(begin + at + step, end)) for begin, end in bounds]


def reduce_scatter(rank: int, pieces: Sequence[Bounds]) -> list[Step]:
    """One round around the ring, P - 1 steps, after which this rank has the whole reduction of ``pieces[rank]``.

    A chunk starts at the rank behind its owner's; every rank on the way adds its own values to what came.
    """
    size = len(pieces)
    right, left = (rank + 1) % size, (rank - 1) % size
    return [Step(right, pieces[rank - 1 - s], left, pieces[rank - 2 - s]) for s in range(size - 1)]


def allgather(rank: int, pieces: Sequence[Bounds]) -> list[Step]:
    """One round around the ring, P - 1 steps: what came in one step is passed on in the next; all get all pieces."""
    size = len(pieces)
    right, left = (rank + 1) % size, (rank - 1) % size
    return [Step(right, pieces[rank - s], left, pieces[rank - 1 - s]) for s in range(size - 1)]


def alltoall(rank: int, size: int, length: int, step: int) -> Iterator[list[Step]]:
    """Rounds of one step: with the ranks at distance 1, 2, ... one after the other, so that no rank is asked by two."""
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        for begin, end in chunks(0, length, step):
            sent, received = (to * length + begin, to * length + end), (source * length + begin, source * length + end)
            yield [Step(to, sent, source, received)]


def gather(rank: int, root: int, bounds: Sequence[Bounds], step: int) -> Iterator[list[Step]]:
    """Rounds of one step: every rank sends its slice, counted from 0, to root, which takes them in rank order."""
    for source, (begin, end) in enumerate(bounds):
        if source != root and rank in (source, root):
            for lower, upper in chunks(begin, end, step):
                if rank == root:
                    yield [Step(source, NOTHING, source, (lower, upper))]
                else:
                    yield [Step(root, (lower - begin, upper - begin), root, NOTHING)]


def scatter(rank: int, root: int, bounds: Sequence[Bounds], step: int) -> Iterator[list[Step]]:
    """Rounds of one step, as of ``gather``: root sends every rank its slice."""
    return map(reversed_in_time, gather(rank, root, bounds, step))


def broadcast(tree: Tree, piece: Bounds) -> list[Step]:
    """One chunk down the tree."""
    received = [] if tree.parent is None else [Step(tree.parent, NOTHING, tree.parent, piece)]
    return received + [Step(child, piece, child, NOTHING) for child in tree.children]


def reduce(tree: Tree, piece: Bounds) -> list[Step]:
    """One chunk up the tree: each rank adds its own values to what its children send, and sends the total on."""
    return reversed_in_time(broadcast(tree, piece))


def tree(rank: int, size: int, root: int, num_chunks: int) -> Tree:
    """This rank's place in the faster of the two trees.

    In units of one message's time, C chunks take C + P - 2 through the chain, whose ranks all send at the same time,
    and about C * ceil(log2(P)) from the root of a binomial tree, which sends every chunk to that many children.
    """
    depth = (size - 1).bit_length()
    kind = chain if num_chunks + size - 2 < num_chunks * depth else binomial
    parent, children = kind((rank - root) % size, size)
    return Tree(None if parent is None else (parent + root) % size, [(child + root) % size for child in children])


def chain(place: int, size: int) -> Tree:
    """The neighbours of a place in the chain 0, 1, ..., size - 1."""
    return Tree(place - 1 if place else None, [place + 1] if place + 1 < size else [])


def binomial(place: int, size: int) -> Tree:
    """The neighbours of a place in the binomial tree with root 0: a parent's number has one bit less."""
    lowest_bit = place & -place if place else 1 << (size - 1).bit_length()
    distances = [1 << bit for bit in reversed(range(lowest_bit.bit_length() - 1))]
    return Tree(place - lowest_bit if place else None, [place + d for d in distances if place + d < size])


def reversed_in_time(steps: Sequence[Step]) -> list[Step]:
    """The last step first, and what was sent is received: from gathering to scattering, from down a tree to up."""
    return [Step(s.source, s.received, s.to, s.sent) for s in reversed(steps)]


@contextmanager
def kept_from(under_way: object) -> Iterator[None]:
    """If an error, or GeneratorExit, ends the work, never give back what is under way: MPI may still write there."""
    try:
        yield
    except BaseException:
        broken_off.append(under_way)
        raise


def in_turns(rounds: Iterable[Iterator[T]], limit: int) -> Iterator[T]:
    """Advance up to ``limit`` iterators at a time, by turns, the oldest first; when one ends, the next one begins.

    What an iterator yields is for the caller to wait for: it is handed out when the turn comes round again, just before
    the iterator is resumed. Rounds of equal length reach their n-th steps in order, on all ranks alike; so two ranks
    agree on the order of their messages, and one tag is enough.
    """
    waiting = iter(rounds)
    active: collections.deque[tuple[Iterator[T], T]] = collections.deque()
    with kept_from(active):
        while True:
            while len(active) < limit and (one := next(waiting, None)) is not None:
                active.extend((one, wanted) for wanted in itertools.islice(one, 1))
            if not active:
                return
            one, wanted = active[0]
            yield wanted
            active.popleft()
            active.extend((one, following) for following in itertools.islice(one, 1))
