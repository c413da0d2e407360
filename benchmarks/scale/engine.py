"""A discrete-event simulation of ranks that send messages: what a flavour sees of MPI, on a clock of its own.

Every rank is a thread that runs the package's code as it is; one runs at a time, until it waits. Nothing but messages,
meetings and what a rank is charged for (`Simulation.work`) takes time. Causes come before effects: a rank goes ahead on
its own clock from the event that resumed it, and what it posts becomes an event not earlier than that one.

A *message* takes ``message_seconds`` of a rank's time at either end. Up to ``eager_bytes`` it sets out when it is
posted, a longer one after two latencies that bring the receiver's consent. It occupies its host's link outwards, then
the receiver's inwards, in the order of setting out, both at the same time where they are free; hosts share no other
part of the network. Between two ranks of a host it occupies the host's memory.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

_STACK_BYTES = 1 << 20
_TEST_SECONDS = 1e-6  # so that a rank that polls comes to the time at which it succeeds


@dataclasses.dataclass(frozen=True)
class Machine:
    """What all hosts and links are like. A link carries so many bytes a second in each direction."""

    link_bytes_per_second: float = 119e6
    latency_seconds: float = 50e-6
    message_seconds: float = 10e-6
    memory_bytes_per_second: float = 4e9  # of a host, for messages and collectives inside
    memory_latency_seconds: float = 2e-6
    reduce_bytes_per_second: float = 4e9  # of a rank that adds two chunks
    eager_bytes: int = 64 << 10


class DeadlockError(RuntimeError):
    """All ranks that have not ended wait for each other."""


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One end of a message, complete from ``end`` on, once that is known."""

    simulation: Simulation
    rank: int
    posted: float
    buffer: Any
    end: float | None = None
    waiter: _Waiter | None = None

    def Wait(self) -> None:  # noqa: N802 - the names of mpi4py
        self.simulation.wait([self])

    @classmethod
    def Waitall(cls, requests: Sequence[Request]) -> None:  # noqa: N802
        if requests:
            requests[0].simulation.wait(requests)

    @classmethod
    def Waitany(cls, requests: Sequence[Request]) -> int:  # noqa: N802
        return requests[0].simulation.wait_any(requests)

    def Test(self) -> bool:  # noqa: N802
        return self.simulation.is_complete([self])

    @classmethod
    def Testall(cls, requests: Sequence[Request]) -> bool:  # noqa: N802
        return not requests or requests[0].simulation.is_complete(requests)


@dataclasses.dataclass(eq=False, slots=True)
class _Waiter:
    """A rank that waits for some requests: for how many more, and until when at least."""

    rank: int
    num_missing: int
    until: float


@dataclasses.dataclass(eq=False, slots=True)
class _Message:
    """A send and the receive that belongs to it, each None until posted."""

    source: int
    destination: int
    sent: Request | None = None
    received: Request | None = None
    payload: bytes = b""
    arrival: float | None = None


class Comm:
    """What flavours use of an MPI communicator; ``ranks`` are those of the world, ``key`` is unique."""

    def __init__(self, simulation: Simulation, key: Hashable, ranks: Sequence[int], rank: int) -> None:
        self.simulation, self.key, self.ranks, self.rank, self.size = simulation, key, ranks, rank, len(ranks)
        self._splits = itertools.count()

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> Request:  # noqa: N802
        return self.simulation.post(self, buffer[0], self.rank, dest, tag, sends=True)

    def Irecv(self, buffer: Any, source: int, tag: int = 0) -> Request:  # noqa: N802
        return self.simulation.post(self, buffer[0], source, self.rank, tag, sends=False)

    def Split(self, color: int, key: int = 0) -> Comm:  # noqa: N802
        given = self.allgather((color, key))
        members = sorted((k, rank) for rank, (c, k) in enumerate(given) if c == color)
        ranks = [rank for _, rank in members]
        name = (self.key, next(self._splits), color)
        return Comm(self.simulation, name, [self.ranks[rank] for rank in ranks], ranks.index(self.rank))

    def allgather(self, value: Any) -> list[Any]:
        return self.simulation.meet(self, value)

    def Barrier(self) -> None:  # noqa: N802
        self.simulation.meet(self, None)

    def Free(self) -> None:  # noqa: N802
        pass


class Simulation:
    """Ranks on hosts; ``host_of`` has the host of each rank. ``carries_values``: messages bring their bytes too."""

    def __init__(self, host_of: Sequence[int], machine: Machine, *, carries_values: bool = False) -> None:
        self.host_of, self.machine, self.carries_values = list(host_of), machine, carries_values
        self.rank = 0  # whose thread runs
        self.now = [0.0] * len(host_of)
        self.num_messages = 0
        self.sent_bytes: dict[int, int] = collections.defaultdict(int)  # over the link of each host
        self._free: dict[Hashable, float] = collections.defaultdict(float)  # when a link or memory is free again
        self._unmatched: dict[Hashable, collections.deque[_Message]] = collections.defaultdict(collections.deque)
        self._meetings: dict[Hashable, dict[int, Any]] = collections.defaultdict(dict)
        self._num_met: dict[Hashable, int] = collections.defaultdict(int)
        self._events: list[tuple[float, int, Callable[[], int | None]]] = []
        self._order = itertools.count()
        self._turns = [threading.Lock() for _ in host_of]
        self._done = threading.Event()
        self._num_running = len(host_of)
        self._error: BaseException | None = None

    def run(self, program: Callable[[Comm], None]) -> None:
        """Run ``program`` on every rank, each with the communicator of all. What it raises goes through."""
        previous = threading.stack_size(_STACK_BYTES)
        for rank in range(len(self.host_of)):
            self._turns[rank].acquire()
            threading.Thread(target=self._run_rank, args=(rank, program), daemon=True).start()
            self._resume(rank, 0.0)
        threading.stack_size(previous)
        self._go_on(None)
        self._done.wait()
        if self._error is not None:
            raise self._error

    def work(self, seconds: float) -> None:
        """The running rank is busy for so long."""
        self.now[self.rank] += seconds

    def meet(self, comm: Comm, value: Any) -> list[Any]:
        """What every rank of ``comm`` gave, once all are here."""
        me = self.rank
        self._num_met[comm.key, me] += 1
        meeting = (comm.key, self._num_met[comm.key, me])
        given = self._meetings[meeting]
        given[comm.rank] = value
        if len(given) == comm.size:
            del self._meetings[meeting]
            begin = max(self.now[rank] for rank in comm.ranks)
            for rank in comm.ranks:
                self._resume(rank, begin)
        self._go_on(me)
        return [given[rank] for rank in range(comm.size)]

    def post(self, comm: Comm, buffer: Any, source: int, destination: int, tag: int, *, sends: bool) -> Request:
        """One end of a message; the n-th send from a rank to another one belongs to the n-th receive."""
        self.work(self.machine.message_seconds)
        request = Request(self, self.rank, self.now[self.rank], buffer)
        waiting, end = self._unmatched[comm.key, source, destination, tag], "sent" if sends else "received"
        if waiting and getattr(waiting[0], end) is None:
            message = waiting.popleft()
        else:
            message = _Message(comm.ranks[source], comm.ranks[destination])
            waiting.append(message)
        setattr(message, end, request)
        if sends:
            self._send(message, request)
        if message.sent is not None and message.received is not None:
            self._match(message, message.sent, message.received)
        return request

    def wait(self, requests: Sequence[Request]) -> None:
        """The running rank waits until all are complete."""
        missing = [request for request in requests if request.end is None]
        known = max((request.end for request in requests if request.end is not None), default=0.0)
        if missing:
            self._wait(missing, len(missing), known)
        else:  # the rank goes ahead of events that cannot concern it
            self.now[self.rank] = max(self.now[self.rank], known)

    def wait_any(self, requests: Sequence[Request]) -> int:
        """The running rank waits until one is complete; the index of the first that is."""
        ends = [request.end for request in requests if request.end is not None]
        if ends:  # but another one may end earlier, by an event that is still to come
            self._resume(self.rank, max(self.now[self.rank], min(ends)))
            self._go_on(self.rank)
        else:
            self._wait(requests, 1, 0.0)
        return min(range(len(requests)), key=lambda index: _end(requests[index]))

    def is_complete(self, requests: Sequence[Request]) -> bool:
        """Whether all are complete by now."""
        self.work(_TEST_SECONDS)
        self._resume(self.rank, self.now[self.rank])
        self._go_on(self.rank)
        return all(_end(request) <= self.now[self.rank] for request in requests)

    def _run_rank(self, rank: int, program: Callable[[Comm], None]) -> None:
        self._turns[rank].acquire()
        try:
            program(Comm(self, "world", range(len(self.host_of)), rank))
        except BaseException as error:
            self._fail(error)
            return
        self._num_running -= 1
        if self._num_running:
            self._go_on(None)
        else:
            self._done.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def _wait(self, missing: Sequence[Request], num_missing: int, known: float) -> None:
        waiter = _Waiter(self.rank, num_missing, known)
        for request in missing:
            request.waiter = waiter
        self._go_on(self.rank)

    def _resume(self, rank: int, time: float) -> None:
        """Make an event that resumes a rank."""
        self.now[rank] = time
        self._at(time, lambda: rank)

    def _at(self, time: float, event: Callable[[], int | None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _go_on(self, mine: int | None) -> None:
        """Carry out events until one resumes a rank; return when that is ``mine``, at once for None."""
        while self._events:
            resumed = heapq.heappop(self._events)[2]()
            if resumed is not None:
                self.rank = resumed
                break
        else:
            self._fail(DeadlockError(f"{self._num_running} ranks wait for messages that nobody sends, or in a meeting"))
            resumed = None
        if resumed == mine:
            return
        if resumed is not None:
            self._turns[resumed].release()
        if mine is not None:
            self._turns[mine].acquire()

    def _send(self, message: _Message, sent: Request) -> None:
        self.num_messages += 1
        if len(sent.buffer) <= self.machine.eager_bytes:
            message.payload = bytes(sent.buffer) if self.carries_values else b""
            self._at(sent.posted, lambda: self._transmit(message, sent, sent.posted))
            self._complete(sent, sent.posted)

    def _match(self, message: _Message, sent: Request, received: Request) -> None:
        """Both ends have been posted."""
        if len(sent.buffer) > len(received.buffer):
            raise ValueError(f"a message of {len(sent.buffer)} bytes for a receiver of {len(received.buffer)}")
        if message.arrival is not None:
            self._receive(message, received)
        elif len(sent.buffer) > self.machine.eager_bytes:
            latency = self._latency(message)
            ready = max(sent.posted + latency, received.posted) + latency
            self._at(ready, lambda: self._transmit(message, sent, ready))

    def _latency(self, message: _Message) -> float:
        inside = self.host_of[message.source] == self.host_of[message.destination]
        return self.machine.memory_latency_seconds if inside else self.machine.latency_seconds

    def _transmit(self, message: _Message, sent: Request, now: float) -> None:
        """A message sets out as soon as its link is free."""
        source, destination = self.host_of[message.source], self.host_of[message.destination]
        num_bytes = len(sent.buffer)
        if source == destination:
            end = self._occupy(("memory", source), now, now, num_bytes / self.machine.memory_bytes_per_second)
        else:
            seconds = num_bytes / self.machine.link_bytes_per_second
            out = self._occupy(("out", source), now, now, seconds)
            end = self._occupy(("in", destination), now, out, seconds)
            self.sent_bytes[source] += num_bytes
        if sent.end is None:
            if self.carries_values:
                message.payload = bytes(sent.buffer)
            self._complete(sent, end)
        message.arrival = end + self._latency(message)
        if message.received is not None:
            self._receive(message, message.received)

    def _occupy(self, resource: Hashable, begin: float, earliest_end: float, seconds: float) -> float:
        """When a resource that is wanted from ``begin`` on has done so many seconds of work."""
        end = self._free[resource] = max(earliest_end, max(begin, self._free[resource]) + seconds)
        return end

    def _receive(self, message: _Message, received: Request) -> None:
        assert message.arrival is not None
        if self.carries_values:
            received.buffer[: len(message.payload)] = message.payload
        self._complete(received, max(message.arrival, received.posted))

    def _complete(self, request: Request, end: float) -> None:
        request.end = end
        waiter = request.waiter
        if waiter is not None:
            waiter.num_missing -= 1
            waiter.until = max(waiter.until, end)
            if waiter.num_missing == 0:
                self._resume(waiter.rank, max(waiter.until, self.now[waiter.rank]))


def _end(request: Request) -> float:
    return float("inf") if request.end is None else request.end
