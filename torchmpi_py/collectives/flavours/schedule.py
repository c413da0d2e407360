"""Plans that determine when each rank works on which elements. They contain only integers and do not communicate.

Tests therefore check the plans of 1 to 37 ranks in one process. The terms are:

- *slice*: The part of a tensor that one rank owns.
- *chunk*: A piece of a tensor or of a slice. A rank processes one chunk after the other. The size of a chunk is chosen
  to fit into a cache, a buffer or a message. A chunk is described by ``Bounds`` (begin, end), and may be empty.
- *tick*: In a pipeline, the time between two barriers.

The plans of flavour ``ring`` determine which rank sends which elements to which rank:

- *round*: The transfer of one chunk of each slice through the ranks. Rounds are independent of each other.
- *step*: A part of a round. The rank posts one send and one receive, waits for both, and uses the received data. The
  bounds of a step refer to the memory from which the rank sends, or into which it receives. Empty bounds mean that
  there is no message.
- *tree*: The ranks through which data travels between the root and the other ranks. In a *chain*, every rank except the
  last one has one child. In a *binomial* tree, every rank that has the data sends it to one more rank in each step, so
  that the number of ranks with the data doubles.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

T = TypeVar("T")
ALIGNMENT = 64  # Slice bounds are multiples of this number of elements, so that no two ranks write into one cache line.

Bounds = tuple[int, int]  # begin, end
NOTHING: Bounds = (0, 0)
broken_off: list[object] = []  # walks that an error has interrupted, with the messages that were under way


@functools.lru_cache(maxsize=1024)
def slices(count: int, size: int) -> tuple[Bounds, ...]:
    """Cut ``count`` elements into ``size`` consecutive slices, as equal as the alignment permits."""
    blocks = -(-count // ALIGNMENT)
    ends = [min(count, blocks * (rank + 1) // size * ALIGNMENT) for rank in range(size)]
    return tuple(zip([0, *ends], ends, strict=False))


def chunks(begin: int, end: int, step: int) -> list[Bounds]:
    """Cut the range from ``begin`` to ``end`` into chunks of ``step`` elements. The last chunk may be shorter."""
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


def pipeline(num_chunks: int, stages: Sequence[Callable[[int], None]], meet: Callable[[], None]) -> None:
    """Take every chunk through all stages. In tick t stage s works on chunk t - s, and then all ranks call ``meet``.

    ``meet`` is usually a barrier. A stage writes into one of two alternating buffers (chunk modulo 2). The next stage
    reads the buffer one tick later, and the buffer is overwritten another tick later. There are num_chunks +
    len(stages) - 1 ticks, so ranks call ``meet`` even without chunks.
    """
    for tick in range(num_chunks + len(stages) - 1):
        for depth, stage in enumerate(stages):
            if 0 <= tick - depth < num_chunks:
                stage(tick - depth)
        meet()


class Step(NamedTuple):
    """A message with the elements ``sent`` to rank ``to``, and a message for the elements ``received`` from ``source``.

    The messages are posted at the same time.
    """

    to: int
    sent: Bounds
    source: int
    received: Bounds


class Tree(NamedTuple):
    """The neighbours of a rank in a tree.

    ``parent`` is None on the root. ``children`` begins with the root of the largest subtree.
    """

    parent: int | None
    children: list[int]


def rounds(bounds: Sequence[Bounds], step: int) -> Iterator[list[Bounds]]:
    """Yield rounds. Round k consists of elements k * step to (k + 1) * step of every slice that has such elements."""
    longest = max(end - begin for begin, end in bounds)
    for at in range(0, longest, step):
        yield [(min(begin + at, end), min(begin + at + step, end)) for begin, end in bounds]


def reduce_scatter(rank: int, pieces: Sequence[Bounds]) -> list[Step]:
    """Return the P - 1 steps of a round around the ring, after which this rank has the reduction of ``pieces[rank]``.

    Each chunk starts at the rank after its owner. Every rank that the chunk passes adds its own values.
    """
    size = len(pieces)
    right, left = (rank + 1) % size, (rank - 1) % size
    return [Step(right, pieces[rank - 1 - s], left, pieces[rank - 2 - s]) for s in range(size - 1)]


def allgather(rank: int, pieces: Sequence[Bounds]) -> list[Step]:
    """Return the P - 1 steps of a round around the ring, in which each rank forwards the piece it received last."""
    size = len(pieces)
    right, left = (rank + 1) % size, (rank - 1) % size
    return [Step(right, pieces[rank - s], left, pieces[rank - 1 - s]) for s in range(size - 1)]


def alltoall(rank: int, size: int, length: int, step: int) -> Iterator[list[Step]]:
    """Yield rounds of one step each, which exchange data with the ranks at distance 1, then 2, and so on.

    ``length`` is the size of a slice, and ``step`` is the largest size of a chunk.
    All ranks use the same distance at the same time, so that no rank receives from two ranks.
    """
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        for begin, end in chunks(0, length, step):
            sent, received = (to * length + begin, to * length + end), (source * length + begin, source * length + end)
            yield [Step(to, sent, source, received)]


def gather(rank: int, root: int, bounds: Sequence[Bounds], step: int) -> Iterator[list[Step]]:
    """Yield rounds of one step each, in which root receives the slices of the other ranks in rank order.

    ``bounds`` lists the slices by rank, and ``step`` is the largest size of a chunk. On ranks other than root, the
    bounds of a ``Step`` are relative to the start of the rank's own slice.
    """
    for source, (begin, end) in enumerate(bounds):
        if source != root and rank in (source, root):
            for lower, upper in chunks(begin, end, step):
                if rank == root:
                    yield [Step(source, NOTHING, source, (lower, upper))]
                else:
                    yield [Step(root, (lower - begin, upper - begin), root, NOTHING)]


def scatter(rank: int, root: int, bounds: Sequence[Bounds], step: int) -> Iterator[list[Step]]:
    """Yield rounds of one step each, in which root sends each other rank its slice: the reverse of ``gather``."""
    return map(reversed_in_time, gather(rank, root, bounds, step))


def broadcast(tree: Tree, piece: Bounds) -> list[Step]:
    """Return this rank's steps for one chunk that travels down the tree."""
    received = [] if tree.parent is None else [Step(tree.parent, NOTHING, tree.parent, piece)]
    return received + [Step(child, piece, child, NOTHING) for child in tree.children]


def reduce(tree: Tree, piece: Bounds) -> list[Step]:
    """Return this rank's steps for one chunk that travels up the tree.

    Each rank adds its values to the values of its children, and sends the sum to its parent.
    """
    return reversed_in_time(broadcast(tree, piece))


def tree(rank: int, size: int, root: int, num_chunks: int) -> Tree:
    """Return this rank's neighbours in the faster of the two trees, the chain and the binomial tree.

    Let one message take time 1. Then C chunks take C + P - 2 through the chain, because all ranks of the chain send at
    the same time. Through a binomial tree they take about C * ceil(log2(P)), because the root sends every chunk to
    ceil(log2(P)) children.
    """
    depth = (size - 1).bit_length()
    kind = chain if num_chunks + size - 2 < num_chunks * depth else binomial
    parent, children = kind((rank - root) % size, size)
    return Tree(None if parent is None else (parent + root) % size, [(child + root) % size for child in children])


def chain(place: int, size: int) -> Tree:
    """Return the neighbours of position ``place`` in the chain 0, 1, ..., size - 1."""
    return Tree(place - 1 if place else None, [place + 1] if place + 1 < size else [])


def binomial(place: int, size: int) -> Tree:
    """Return the neighbours of position ``place`` in the binomial tree with root 0.

    A parent's number is the child's number without its lowest bit.
    """
    lowest_bit = place & -place if place else 1 << (size - 1).bit_length()
    distances = [1 << bit for bit in reversed(range(lowest_bit.bit_length() - 1))]
    return Tree(place - lowest_bit if place else None, [place + d for d in distances if place + d < size])


def reversed_in_time(steps: Sequence[Step]) -> list[Step]:
    """Return the steps in reverse order, with sends and receives exchanged. So a gather becomes a scatter."""
    return [Step(s.source, s.received, s.to, s.sent) for s in reversed(steps)]


@contextmanager
def kept_from(under_way: object) -> Iterator[None]:
    """Keep ``under_way`` alive forever if an error, or GeneratorExit, ends the block.

    ``under_way`` refers to the buffers of pending messages, which MPI may still read or write.
    """
    try:
        yield
    except BaseException:
        broken_off.append(under_way)
        raise


def in_turns(rounds: Iterable[Iterator[T]], limit: int) -> Iterator[T]:
    """Advance up to ``limit`` iterators alternately, the oldest first. When one ends, start the next one of ``rounds``.

    The values of the iterators are pending requests, for which the caller waits. A value is yielded only when its
    iterator has the next turn, just before the iterator is resumed. So the requests of several iterators are pending at
    the same time. Rounds of equal length reach their n-th steps in the same order on all ranks. So any two ranks agree
    on the order of their messages, and one tag is enough.
    """
    waiting = iter(rounds)
    active: collections.deque[tuple[Iterator[T], T]] = collections.deque()
    with kept_from(active):
        while True:
            while len(active) < limit and (one := next(waiting, None)) is not None:
                active.extend((one, pending) for pending in itertools.islice(one, 1))
            if not active:
                return
            one, pending = active[0]
            yield pending
            active.popleft()
            active.extend((one, following) for following in itertools.islice(one, 1))
