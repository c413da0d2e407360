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
from torchmpi_py.collectives.flavours.schedule import slices

pytestmark = pytest.mark.timeout(240)

SIZES = range(1, 38)
BIG_AND_SMALL = [1, 2, 3, 4, 5, 8, 13, 37]


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


def allreduce(size, count, step, limit, bounds=None):
    """(results, elements sent) by rank of a simulated allreduce in place."""
    network, bounds = Network(size), bounds or slices(count, size)
    memories = [values(rank, count) for rank in range(size)]

    def walks_of(rank):
        x = memories[rank]

        def around_twice(pieces):
            yield from reducing(network, rank, plan.reduce_scatter(rank, pieces), x, part(x, pieces[rank]))
            yield from copying(network, rank, plan.allgather(rank, pieces), x, x)

        return map(around_twice, plan.rounds(bounds, step))

    network.run(walks_of, limit)
    return memories, network.num_sent


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1])
def test_allreduce(size):
    for count, step, limit in ((0, 5, 2), (1, 5, 2), (size * 64, 30, 3), (size * 64 + 70, 64, 1), (1000, 1000, 4)):
        results, num_sent = allreduce(size, count, step, limit)
        for rank, result in enumerate(results):
            np.testing.assert_array_equal(result, total(size, count))
            lengths = [end - begin for begin, end in slices(count, size)]
            assert num_sent[rank] == 2 * count - lengths[rank] - lengths[(rank + 1) % size]
            if count == size * 64:
                assert num_sent[rank] == 2 * count * (size - 1) // size


@given(lengths=st.lists(st.integers(0, 9), min_size=2, max_size=9), step=st.integers(1, 5), limit=st.integers(1, 5))
@settings(deadline=None)
def test_allreduce_of_any_slices(lengths, step, limit):
    ends = np.cumsum(lengths).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    for result in allreduce(len(lengths), ends[-1], step, limit, bounds)[0]:
        np.testing.assert_array_equal(result, total(len(lengths), ends[-1]))


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1])
def test_reduce_scatter(size):
    for length, step, limit in ((0, 3, 2), (1, 3, 2), (7, 3, 3)):
        network = Network(size)
        bounds = [(rank * length, (rank + 1) * length) for rank in range(size)]
        results = np.zeros((size, length), dtype=np.int64)

        def walks_of(rank, network=network, bounds=bounds, results=results, step=step):
            x = values(rank, results.size)
            before, _ = bounds[rank]
            for pieces in plan.rounds(bounds, step):
                begin, end = pieces[rank]
                target = results[rank, begin - before : end - before]
                yield reducing(network, rank, plan.reduce_scatter(rank, pieces), x, target)

        network.run(walks_of, limit)
        np.testing.assert_array_equal(results.reshape(-1), total(size, size * length))
        assert network.num_sent == [(size - 1) * length] * size


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=37), step=st.integers(1, 9), limit=st.integers(1, 5))
@settings(deadline=None)
def test_allgather_of_unequal_slices(lengths, step, limit):
    size, ends = len(lengths), np.cumsum(lengths).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    network, expected = Network(size), np.arange(ends[-1])
    memories = [np.where((begin <= expected) & (expected < end), expected, -1) for begin, end in bounds]

    def walks_of(rank):
        for pieces in plan.rounds(bounds, step):
            yield copying(network, rank, plan.allgather(rank, pieces), memories[rank], memories[rank])

    network.run(walks_of, limit)
    for rank, memory in enumerate(memories):
        np.testing.assert_array_equal(memory, expected)
        assert network.num_sent[rank] == ends[-1] - lengths[(rank + 1) % size]


@pytest.mark.parametrize("size", SIZES)
def test_alltoall(size):
    for length, step, limit in ((0, 3, 2), (1, 3, 2), (7, 3, 3)):
        network = Network(size)
        given = np.arange(size * size * length).reshape(size, size, length)
        taken = np.zeros_like(given)
        for rank in range(size):
            taken[rank, rank] = given[rank, rank]

        def walks_of(rank, network=network, given=given, taken=taken, length=length, step=step):
            for steps in plan.alltoall(rank, network.size, length, step):
                yield copying(network, rank, steps, given[rank].reshape(-1), taken[rank].reshape(-1))

        network.run(walks_of, limit)
        np.testing.assert_array_equal(taken, given.transpose(1, 0, 2))
        assert network.num_sent == [(size - 1) * length] * size


@pytest.mark.parametrize("size", BIG_AND_SMALL)
def test_gather_and_scatter(size):
    lengths = [(7 * rank) % 5 for rank in range(size)]
    ends = np.cumsum(lengths).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    whole = np.arange(ends[-1])
    for root in range(size):
        for verb in (plan.gather, plan.scatter):
            network = Network(size)
            parts = [part(whole, b) * (verb is plan.gather or rank == root) for rank, b in enumerate(bounds)]
            at_root = whole.copy() if verb is plan.scatter else np.zeros_like(whole)
            part(at_root, bounds[root])[:] = parts[root]

            def walks_of(rank, network=network, parts=parts, at_root=at_root, root=root, verb=verb):
                memory = at_root if rank == root else parts[rank]
                for steps in verb(rank, root, bounds, 2):
                    yield copying(network, rank, steps, memory, memory)

            network.run(walks_of, 3)
            np.testing.assert_array_equal(at_root, whole)
            for rank in range(size):
                np.testing.assert_array_equal(parts[rank], part(whole, bounds[rank]))


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_and_reduce(size):
    """Every root; 1 chunk goes through the binomial tree, 5 chunks through it or the chain, 40 through the chain."""
    for root in range(size) if size in BIG_AND_SMALL else (0, size // 2, size - 1):
        for count in (0, 3, 13, 120) if root < 3 else (3, 13):
            broadcast_and_reduce(size, root, count, step=3)


def broadcast_and_reduce(size, root, count, step):
    pieces = [piece for (piece,) in plan.rounds([(0, count)], step)]
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [plan.chain, plan.binomial])
def test_trees(kind, size):
    """Everybody has one parent, who knows of it; in the binomial tree none is further from the root than log2 says."""
    places = [kind(place, size) for place in range(size)]
    for place, (parent, children) in enumerate(places):
        assert (parent is None) == (place == 0)
        assert all(places[child].parent == place for child in children)
        assert parent is None or place in places[parent].children
    assert sum(len(children) for _, children in places) == size - 1
    depth = (size - 1).bit_length()
    assert max(len(children) for _, children in places) <= (1 if kind is plan.chain else depth)
    if kind is plan.binomial:
        distances = [0]
        for parent, _ in places[1:]:
            distances.append(distances[parent] + 1)
        assert max(distances) <= depth
        assert all(children == sorted(children, reverse=True) for _, children in places)


def test_which_tree():
    """The binomial one for few chunks on many ranks."""
    assert plan.tree(0, 37, 0, 1).children == [32, 16, 8, 4, 2, 1]
    assert plan.tree(36, 37, 36, 1).children == [31, 15, 7, 3, 1, 0]
    assert plan.tree(0, 37, 0, 7).children == [32, 16, 8, 4, 2, 1]
    assert plan.tree(0, 37, 0, 8).children == [1]
    assert plan.tree(0, 4, 0, 3).children == [1]
    assert all(plan.tree(rank, 2, 0, chunks) == plan.chain(rank, 2) for rank in (0, 1) for chunks in (1, 9))


def test_rounds():
    assert list(plan.rounds([(0, 5), (5, 5), (5, 8)], 2)) == [
        [(0, 2), (5, 5), (5, 7)],
        [(2, 4), (5, 5), (7, 8)],
        [(4, 5), (5, 5), (8, 8)],
    ]
    assert list(plan.rounds([(0, 0)], 2)) == []


@given(lengths=st.lists(st.integers(0, 4), max_size=9), limit=st.integers(1, 4))
def test_turns(lengths, limit):
    """All are walked to their end, in order, at most ``limit`` at a time; what is yielded is waited for in order."""
    under_way, most, log = set(), 0, []

    def walk(number, length):
        nonlocal most
        under_way.add(number)
        most = max(most, len(under_way))
        for at in range(length):
            log.append(("posted", number, at))
            yield number, at
            log.append(("complete", number, at))
        under_way.remove(number)

    for number, at in plan.in_turns((walk(number, length) for number, length in enumerate(lengths)), limit):
        log.append(("waited", number, at))
    assert not under_way
    assert most <= limit
    for what in ("posted", "waited", "complete"):
        seen = [event[1:] for event in log if event[0] == what]
        assert sorted(seen) == [(number, at) for number, length in enumerate(lengths) for at in range(length)]
    assert all(log[log.index(("complete", *event[1:])) - 1] == event for event in log if event[0] == "waited")


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
