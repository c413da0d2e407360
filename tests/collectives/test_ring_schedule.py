"""The plans of flavour ring on simulated ranks: all in this process, with messages as late as MPI allows.

Element j of rank r holds 2^r + j * 2^40, so that a sum tells which ranks are in it how often, and of which element.
"""

import collections
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from torchmpi_py.collectives.flavours import schedule as plan

pytestmark = pytest.mark.timeout(240)

SIZES = [1, 2, 3, 4, 5, 7, 8, 13]
ROOTS = [(size, root) for size in SIZES for root in range(size)]


def values(rank, count):
    return (1 << rank) + (np.arange(count) << 40)


def total(size, count):
    return (1 << size) - 1 + size * (np.arange(count) << 40)


class Message:
    """The k-th from one rank to another: copied only when both ends are posted and one of them waits for it."""

    given = taken = None
    is_done = False

    def complete(self):
        if self.given is None or self.taken is None:
            return False
        if not self.is_done:
            assert len(self.given) == len(self.taken) > 0
            self.taken[:] = self.given
            self.is_done = True
        return True


class Network:
    """Pairs sends and receives of two ranks in the order in which each posted them, as MPI does for one tag."""

    def __init__(self, size):
        self.size = size
        self.messages = collections.defaultdict(Message)
        self.num_posted = collections.Counter()
        self.num_sent = [0] * size  # elements

    def post(self, rank, step, given, taken):
        """What a rank waits for after having posted the messages of a step."""
        wanted = []
        if len(given):
            assert step.to != rank
            self.num_sent[rank] += len(given)
            wanted.append(self._next("sent", rank, step.to))
            wanted[-1].given = given
        if len(taken):
            assert step.source != rank
            wanted.append(self._next("received", step.source, rank))
            wanted[-1].taken = taken
        return wanted

    def _next(self, end, source, to):
        number = self.num_posted[end, source, to]
        self.num_posted[end, source, to] += 1
        return self.messages[source, to, number]

    def run(self, walks_of, limit):
        """Let every rank take its walks by turns, until all are through; every message must have arrived by then."""
        programs = [plan.in_turns(walks_of(rank), limit) for rank in range(self.size)]
        waiting = {rank: wanted for rank, program in enumerate(programs) if (wanted := next(program, None)) is not None}
        while waiting:
            finished = [rank for rank, wanted in waiting.items() if all(message.complete() for message in wanted)]
            assert finished, "every rank waits for another one"
            for rank in finished:
                wanted = next(programs[rank], None)
                waiting.pop(rank) if wanted is None else waiting.update({rank: wanted})
        assert all(message.is_done for message in self.messages.values())


def part(x, bounds):
    return x[slice(*bounds)]


def copying(network, rank, steps, given, taken):
    for step in steps:
        yield network.post(rank, step, part(given, step.sent), part(taken, step.received))


def reducing(network, rank, steps, x, target):
    """``target`` (a view of the result), if any, becomes what came last with this rank's own values added."""
    held, partial = plan.NOTHING, x[:0]
    for step in steps:
        came = np.zeros(step.received[1] - step.received[0], dtype=np.int64)
        given = partial if step.sent == held else part(x, step.sent)
        yield network.post(rank, step, given, came)
        if len(came):
            mine = partial if step.received == held else part(x, step.received)
            held, partial = step.received, mine + came
    if target is not None and len(target):
        target[:] = partial


def bounds_of(lengths):
    ends = np.cumsum(lengths).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@given(lengths=st.lists(st.integers(0, 9), min_size=2, max_size=13), step=st.integers(1, 10), limit=st.integers(1, 5))
@settings(deadline=None)
def test_allreduce(lengths, step, limit):
    """In place, of any slices."""
    size, count = len(lengths), sum(lengths)
    network, memories = Network(size), [values(rank, count) for rank in range(size)]

    def walks_of(rank):
        x = memories[rank]

        def around_twice(pieces):
            yield from reducing(network, rank, plan.reduce_scatter(rank, pieces), x, part(x, pieces[rank]))
            yield from copying(network, rank, plan.allgather(rank, pieces), x, x)

        return map(around_twice, plan.rounds(bounds_of(lengths), step))

    network.run(walks_of, limit)
    for rank, memory in enumerate(memories):
        np.testing.assert_array_equal(memory, total(size, count))
        assert network.num_sent[rank] == 2 * count - lengths[rank] - lengths[(rank + 1) % size]


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=17), step=st.integers(1, 9), limit=st.integers(1, 5))
@settings(deadline=None)
def test_allgather_of_unequal_slices(lengths, step, limit):
    bounds, expected = bounds_of(lengths), np.arange(sum(lengths))
    network = Network(len(lengths))
    memories = [np.where((begin <= expected) & (expected < end), expected, -1) for begin, end in bounds]

    def walks_of(rank):
        for pieces in plan.rounds(bounds, step):
            yield copying(network, rank, plan.allgather(rank, pieces), memories[rank], memories[rank])

    network.run(walks_of, limit)
    for rank, memory in enumerate(memories):
        np.testing.assert_array_equal(memory, expected)
        assert network.num_sent[rank] == sum(lengths) - lengths[(rank + 1) % len(lengths)]


@pytest.mark.parametrize("length", [0, 1, 7])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_and_alltoall(size, length):
    bounds = bounds_of([length] * size)
    summed, results = Network(size), np.zeros((size, length), dtype=np.int64)
    exchanged, given = Network(size), np.arange(size * size * length).reshape(size, size, length)
    taken = np.zeros_like(given)

    def sums_of(rank):
        x, (before, _) = values(rank, size * length), bounds[rank]
        for pieces in plan.rounds(bounds, 3):
            begin, end = pieces[rank]
            target = results[rank, begin - before : end - before]
            yield reducing(summed, rank, plan.reduce_scatter(rank, pieces), x, target)

    def moves_of(rank):
        taken[rank, rank] = given[rank, rank]
        for steps in plan.alltoall(rank, size, length, 3):
            yield copying(exchanged, rank, steps, given[rank].reshape(-1), taken[rank].reshape(-1))

    if size > 1:
        summed.run(sums_of, 2)
        np.testing.assert_array_equal(results.reshape(-1), total(size, size * length))
    exchanged.run(moves_of, 3)
    np.testing.assert_array_equal(taken, given.transpose(1, 0, 2))
    assert exchanged.num_sent == [(size - 1) * length] * size
    assert summed.num_sent in (exchanged.num_sent, [0])


@pytest.mark.parametrize("verb", [plan.gather, plan.scatter])
@pytest.mark.parametrize(("size", "root"), ROOTS)
def test_gather_and_scatter(size, root, verb):
    bounds, network = bounds_of([(7 * rank) % 5 for rank in range(size)]), Network(size)
    whole = np.arange(bounds[-1][1])
    parts = [part(whole, b) * (verb is plan.gather or rank == root) for rank, b in enumerate(bounds)]
    at_root = whole.copy() if verb is plan.scatter else np.zeros_like(whole)
    part(at_root, bounds[root])[:] = parts[root]

    def walks_of(rank):
        memory = at_root if rank == root else parts[rank]
        for steps in verb(rank, root, bounds, 2):
            yield copying(network, rank, steps, memory, memory)

    network.run(walks_of, 3)
    np.testing.assert_array_equal(at_root, whole)
    for rank in range(size):
        np.testing.assert_array_equal(parts[rank], part(whole, bounds[rank]))


@pytest.mark.parametrize("count", [0, 3, 13, 120])  # 1 chunk: binomial tree; 5: one of both; 40: chain
@pytest.mark.parametrize(("size", "root"), ROOTS)
def test_broadcast_and_reduce(size, root, count):
    pieces = [piece for (piece,) in plan.rounds([(0, count)], 3)]
    trees = [plan.tree(rank, size, root, len(pieces)) for rank in range(size)]
    downwards, upwards = Network(size), Network(size)
    copies = [values(root, count) * (rank == root) for rank in range(size)]
    reduced = np.zeros(count, dtype=np.int64)

    def down(rank):
        for piece in pieces:
            yield copying(downwards, rank, plan.broadcast(trees[rank], piece), copies[rank], copies[rank])

    def up(rank):
        for piece in pieces:
            target = part(reduced, piece) if rank == root else None
            yield reducing(upwards, rank, plan.reduce(trees[rank], piece), values(rank, count), target)

    downwards.run(down, 3)
    for copy in copies:
        np.testing.assert_array_equal(copy, values(root, count))
    assert sum(downwards.num_sent) == (size - 1) * count
    if size > 1:
        upwards.run(up, 3)
        np.testing.assert_array_equal(reduced, total(size, count))
        assert upwards.num_sent == [0 if rank == root else count for rank in range(size)]


def test_which_tree():
    """The binomial one for few chunks on many ranks: no rank is further from the root than log2 says."""
    for root, chunks in ((0, 1), (36, 1), (0, 7)):
        trees, distances = [plan.tree(rank, 37, root, chunks) for rank in range(37)], {root: 0}
        assert trees[root].children == [(root + distance) % 37 for distance in (32, 16, 8, 4, 2, 1)]
        for rank in sorted(range(37), key=lambda rank: (rank - root) % 37)[1:]:
            distances[rank] = distances[trees[rank].parent] + 1
        assert max(distances.values()) <= 6
    assert plan.tree(0, 37, 0, 8).children == [1]
    assert plan.tree(0, 4, 0, 3).children == [1]


@given(lengths=st.lists(st.integers(0, 4), max_size=9), limit=st.integers(1, 4))
def test_turns(lengths, limit):
    """All are walked to their end, at most ``limit`` at a time; each goes on when what it yielded was waited for."""
    under_way, waited = set(), set()

    def walk(number, length):
        under_way.add(number)
        assert len(under_way) <= limit
        for at in range(length):
            yield number, at
            assert (number, at) in waited
        under_way.remove(number)

    for number, at in plan.in_turns((walk(number, length) for number, length in enumerate(lengths)), limit):
        assert all((number, before) in waited for before in range(at))
        waited.add((number, at))
    assert not under_way
    assert waited == {(number, at) for number, length in enumerate(lengths) for at in range(length)}


@pytest.mark.parametrize("where", ["in the caller", "in a round"])
def test_an_error_gives_no_memory_back(monkeypatch, where):
    """MPI may still write into that of the messages that other rounds have posted."""
    monkeypatch.setattr(plan, "broken_off", [])
    buffers = [np.zeros(3) for _ in range(3)]
    alive = [weakref.ref(buffer) for buffer in buffers]

    def walk(buffer):
        yield buffer
        if where == "in a round":
            raise ZeroDivisionError
        yield buffer

    def go():
        for number, _ in enumerate(plan.in_turns((walk(buffers.pop(0)) for _ in range(3)), 3)):
            if where == "in the caller" and number == 1:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go()
    gc.collect()
    kept = [ref() is not None for ref in alive]
    assert kept == [where == "in the caller", True, True]  # a round that an error has ended had got its messages
