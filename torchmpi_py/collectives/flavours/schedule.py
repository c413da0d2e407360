"""Plans of which rank works on which elements, and when: arithmetic on integers, tested for 1 to 37 ranks in a process.

- *slice*: The part of a tensor that one rank owns.
- *chunk*: A piece of a tensor or of a slice that a rank works on at a time. It stays in cache, or fits in a buffer or a
  message. ``Bounds`` (begin, end) describe a chunk, which may be empty.
- *tick*: In a pipeline, the time between two barriers.

The plans of flavour ring determine which rank sends which elements to which rank:

- *round*: The chunks with one number, one of each slice, on their way through the ranks. No round waits for another.
- *step*: A rank's work at a time in a round. The rank posts one message to a rank and one from a rank, waits for both,
  and uses the received data. Bounds refer to the memory from which the rank sends, or into which it receives. Empty
  bounds need no message.
- *tree*: The ranks through which data travels between the root and all others. In a *chain*, every rank has one child.
  In a *binomial* tree, every rank that has the data at some time sends it to one more.
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
broken_off: list[object] = []  # messages that were under way when an error ended the work


@functools.lru_cache(maxsize=1024)
def slices(count: int, size: int) -> tuple[Bounds, ...]:
    """Return ``count`` elements cut into ``size`` slices in order, as equal as the alignment permits."""
    blocks = -(-count // ALIGNMENT)
    ends = [min(count, blocks * (rank + 1) // size * ALIGNMENT) for rank in range(size)]
    return tuple(zip([0, *ends], ends, strict=False))


def chunks(begin: int, end: int, step: int) -> list[Bounds]:
    """Return the range cut into pieces of ``step`` elements; the last piece may be shorter."""
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


def pipeline(num_chunks: int, stages: Sequence[Callable[[int], None]], meet: Callable[[], None]) -> None:
    """Take every chunk through all stages: in tick t stage s works on chunk t - s, and ``meet`` follows each tick.

    A stage writes into one of two alternating buffers (chunk modulo 2). The next stage reads it one tick later, and it
    is overwritten one tick after that. The ticks are num_chunks + len(stages) - 1, so ranks also meet without chunks.
    """
    for tick in range(num_chunks + len(stages) - 1):
        for depth, stage in enumerate(stages):
            if 0 <= tick - depth < num_chunks:
                stage(tick - depth)
        meet()


class Step(NamedTuple):
    """A message to rank ``to`` with the elements ``sent``, and one from rank ``source`` for elements ``received``."""

    to: int
    sent: Bounds
    source: int
    received: Bounds


class Tree(NamedTuple):
    """The neighbours of a rank: ``parent``, which is None on the root, and ``children``, the largest subtree first."""

    parent: int | None
    children: list[int]


def rounds(bounds: Sequence[Bounds], step: int) -> Iterator[list[Bounds]]:
    """Yield rounds: round k has the elements k * step to (k + 1) * step of every slice, as far as the slice goes."""
    longest = max(end - begin for begin, end in bounds)
    for at in range(0, longest, step):
        yield [(min(begin + at, end), min(begin + at + step, end)) for begin, end in bounds]


def reduce_scatter(rank: int, pieces: Sequence[Bounds]) -> list[Step]:
    """Return one round around the ring, P - 1 steps, after which this rank has the reduction of ``pieces[rank]``.

    A chunk starts at the rank after its owner. Every rank on the way adds its own values to the received ones.
    """
    size = len(pieces)
    right, left = (rank + 1) % size, (rank - 1) % size
    return [Step(right, pieces[rank - 1 - s], left, pieces[rank - 2 - s]) for s in range(size - 1)]


def allgather(rank: int, pieces: Sequence[Bounds]) -> list[Step]:
    """Return one round around the ring, P - 1 steps, in which each rank passes on the piece of the step before."""
    size = len(pieces)
    right, left = (rank + 1) % size, (rank - 1) % size
    return [Step(right, pieces[rank - s], left, pieces[rank - 1 - s]) for s in range(size - 1)]


def alltoall(rank: int, size: int, length: int, step: int) -> Iterator[list[Step]]:
    """Yield rounds of one step with the ranks at distance 1, 2, ..., so that no rank receives from two at a time."""
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        for begin, end in chunks(0, length, step):
            sent, received = (to * length + begin, to * length + end), (source * length + begin, source * length + end)
            yield [Step(to, sent, source, received)]


def gather(rank: int, root: int, bounds: Sequence[Bounds], step: int) -> Iterator[list[Step]]:
    """Yield rounds of one step: every rank sends its slice, counted from 0, to root, which receives in rank order."""
    for source, (begin, end) in enumerate(bounds):
        if source != root and rank in (source, root):
            for lower, upper in chunks(begin, end, step):
                if rank == root:
                    yield [Step(source, NOTHING, source, (lower, upper))]
                else:
                    yield [Step(root, (lower - begin, upper - begin), root, NOTHING)]


def scatter(rank: int, root: int, bounds: Sequence[Bounds], step: int) -> Iterator[list[Step]]:
    """Return rounds of one step, which reverse ``gather``: root sends every rank its slice."""
    return map(reversed_in_time, gather(rank, root, bounds, step))


def broadcast(tree: Tree, piece: Bounds) -> list[Step]:
    """Return the steps of one chunk down the tree."""
    received = [] if tree.parent is None else [Step(tree.parent, NOTHING, tree.parent, piece)]
    return received + [Step(child, piece, child, NOTHING) for child in tree.children]


def reduce(tree: Tree, piece: Bounds) -> list[Step]:
    """Return the steps of one chunk up the tree: each rank adds its values to those of its children, and sends on."""
    return reversed_in_time(broadcast(tree, piece))


def tree(rank: int, size: int, root: int, num_chunks: int) -> Tree:
    """Return this rank's place in the faster of the two trees.

    In units of one message's time, C chunks take C + P - 2 through the chain, whose ranks all send at the same time.
    From the root of a binomial tree they take about C * ceil(log2(P)), because it sends every chunk to that many
    children.
    """
    depth = (size - 1).bit_length()
    kind = chain if num_chunks + size - 2 < num_chunks * depth else binomial
    parent, children = kind((rank - root) % size, size)
    return Tree(None if parent is None else (parent + root) % size, [(child + root) % size for child in children])


def chain(place: int, size: int) -> Tree:
    """Return the neighbours of a place in the chain 0, 1, ..., size - 1."""
    return Tree(place - 1 if place else None, [place + 1] if place + 1 < size else [])


def binomial(place: int, size: int) -> Tree:
    """Return the neighbours of a place in the binomial tree with root 0, where a parent's number has one bit less."""
    lowest_bit = place & -place if place else 1 << (size - 1).bit_length()
    distances = [1 << bit for bit in reversed(range(lowest_bit.bit_length() - 1))]
    return Tree(place - lowest_bit if place else None, [place + d for d in distances if place + d < size])


def reversed_in_time(steps: Sequence[Step]) -> list[Step]:
    """Return the steps in reverse order, with sending and receiving exchanged: a gather becomes a scatter."""
    return [Step(s.source, s.received, s.to, s.sent) for s in reversed(steps)]


@contextmanager
def kept_from(under_way: object) -> Iterator[None]:
    """Keep ``under_way`` alive for ever if an error, or GeneratorExit, ends the block: MPI may still write there."""
    try:
        yield
    except BaseException:
        broken_off.append(under_way)
        raise


def in_turns(rounds: Iterable[Iterator[T]], limit: int) -> Iterator[T]:
    """Advance up to ``limit`` iterators alternately, the oldest first; when one ends, the next one begins.

    The caller waits for the values that an iterator yields. The function yields each value in the next turn of its
    iterator, just before the iterator is resumed. Rounds of equal length reach their n-th steps in the same order on
    all ranks. So two ranks agree on the order of their messages, and one tag is enough.
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
