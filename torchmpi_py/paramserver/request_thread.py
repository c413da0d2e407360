"""The thread in which a rank's requests to parameter servers run, in the order in which they are made.

A request first asks other nodes and works on the shards of its own node, and is complete when the replies have come.
Meanwhile the next one to the same server begins: a request between nodes costs a round trip only where the program
waits for it. Each shard takes the requests of a rank in order, and handles are completed in that order.

A request to another server begins when those before are complete: a program may tell others by one server that it has
sent to another. So does a request for a tensor that one under way writes to, or reads from if the request writes.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import communicators, journal
from torchmpi_py.core.backoff import Nap, end_sleeps_in_time
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.handles import Handle, ThreadHandle, Work
from torchmpi_py.paramserver.remote import Client, PendingReply

R = TypeVar("R")
_MOST_UNDER_WAY = 64  # requests; a service keeps the messages of those that it has not carried out
_LONGEST_NAP_SECONDS = 0.0001  # of a rank that waits for a reply


class Answers:
    """The outcome of a request so far: errors, and replies of other nodes."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []
        self._replies: list[tuple[Client, PendingReply]] = []

    def attempt(self, work: Callable[[], object]) -> None:
        """Do a part of the request; its error is the request's, and the other parts are done as well."""
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def expect(self, client: Client, reply: PendingReply) -> None:
        """The request is not complete without a reply."""
        self._replies.append((client, reply))

    def clients(self) -> list[Client]:
        """The clients whose replies are expected."""
        return [client for client, _ in self._replies]

    def are_complete(self) -> bool:
        """Whether all replies have come."""
        return all(reply.is_complete for _, reply in self._replies)

    def check(self) -> None:
        """Raise the first error, if there was one: this node's before those of others."""
        for error in [*self._errors, *(reply.error for _, reply in self._replies)]:
            if error is not None:
                raise error


class Uses(NamedTuple):
    """The objects that a request uses: a server, and a tensor of the program, which it reads, or ``writes``."""

    server: object
    memory: Tensor | None = None
    writes: bool = False


class _Request(Work[R]):
    """``begin`` asks other nodes, and does what is to do on this one; ``end`` gives the result."""

    def __init__(
        self,
        label: str,
        begin: Callable[[Answers], object],
        end: Callable[[], R],
        entry: journal.Entry | None,
        uses: Uses,
    ) -> None:
        self.entry = entry
        self.server, self.writes = uses.server, uses.writes
        self.storage = 0 if uses.memory is None else uses.memory.untyped_storage().data_ptr()
        self.answers = Answers()
        self._label = label
        self._steps: tuple[Callable[[Answers], object], Callable[[], R]] | None = begin, end

    @property
    def label(self) -> str:
        return self._label

    def begin(self) -> None:
        """Do what can be done without other nodes, and ask them. An error is raised by ``run``."""
        assert self._steps is not None, "requests run once"
        if self.entry is not None:
            journal.begin(self.entry)
        begin = self._steps[0]
        self.answers.attempt(lambda: begin(self.answers))

    def run(self, in_background: bool = False) -> R:
        assert self._steps is not None, "requests run once"
        try:
            self.answers.check()
            result = self._steps[1]()
        except BaseException:
            if self.entry is not None:
                journal.fail(self.entry)
            raise
        if self.entry is not None:
            journal.end_launched(self.entry)
        return result

    def release(self) -> None:
        self._steps, self.answers = None, Answers()


class _Pipeline(CommunicationThread):
    """Begins requests in the order of the queue, and completes them in that order."""

    def __init__(self) -> None:
        super().__init__(inline=False, name="parameter-server")
        self._under_way: deque[ThreadHandle[Any]] = deque()
        self._server: object = None  # of the requests under way
        self._in_use: Counter[tuple[int, bool]] = Counter()  # their storages, by address and whether they are written
        self._clients: list[Client] = []  # that expect replies
        self._nap = Nap(_LONGEST_NAP_SECONDS, share=0.25)

    @torch.inference_mode()  # in whatever mode the caller's tensors were made
    def _loop(self) -> None:
        end_sleeps_in_time()
        while (handle := self._next()) is not None:
            self._begin(handle)
            del handle  # or its buffers would live until the next one
        while self._under_way:
            self._wait()

    def _next(self) -> ThreadHandle[Any] | None:
        """The next request, or the end; replies are taken meanwhile."""
        # Only with nothing under way does the thread sleep in the queue: else replies have to be looked for.
        while self._under_way and (self._queue.empty() or len(self._under_way) >= _MOST_UNDER_WAY):
            self._wait()
        return self._queue.get()

    def _begin(self, handle: ThreadHandle[Any]) -> None:
        request = handle._work
        if isinstance(request, _Request):  # and not an end mark
            while self._under_way and self._has_to_wait(request):
                self._wait()
            self._server = request.server
            self._in_use[request.storage, request.writes] += 1
            request.begin()
            self._clients += [client for client in request.answers.clients() if client not in self._clients]
        self._under_way.append(handle)
        self._nap.begin()
        self._take_replies()

    def _has_to_wait(self, request: _Request[Any]) -> bool:
        """Whether the order in which a request and those under way are carried out matters."""
        # Readers of a tensor may be under way together; a writer is alone with it.
        is_written = self._in_use[request.storage, True]
        is_in_use = is_written or (request.writes and self._in_use[request.storage, False])
        return request.server is not self._server or bool(request.storage and is_in_use)

    def _wait(self) -> None:
        """Take replies, or nap if there are none."""
        if not self._take_replies():
            self._nap.take()

    def _take_replies(self) -> bool:
        """Take the replies that have come, and complete what they were awaited for; whether there were any."""
        has_moved = False
        for client in list(self._clients):
            has_moved |= client.advance()
            if client.is_idle:
                self._clients.remove(client)
        # Handles are completed in the order of the requests, whichever replies come first.
        while self._under_way and self._is_complete(self._under_way[0]._work):
            self._under_way.popleft().execute()
        if not self._under_way:
            self._server = None
        if has_moved:
            self._nap.begin()
        return has_moved

    def _is_complete(self, work: Work[Any] | None) -> bool:
        if not isinstance(work, _Request):
            return True  # an end mark
        if is_complete := work.answers.are_complete():
            key = work.storage, work.writes
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]
        return is_complete


class RequestThread:
    """The thread of a rank's requests; kept with the world.

    It is not the thread of asynchronous collectives, which wait for other ranks: a parameter server waits for none. It
    runs from the first request until a server is freed, and again from the next request.
    """

    def __init__(self, world: Channel) -> None:
        self._lock = threading.Lock()  # no request is queued on a thread that ends
        self._thread = _Pipeline()

    def submit(
        self,
        label: str,
        begin: Callable[[Answers], object],
        end: Callable[[], R],
        uses: Uses,
        *,
        is_recorded: bool = True,
    ) -> Handle[R]:
        """Queue a request: what ``begin`` expects comes, then ``end`` gives the handle's result.

        Requests that repeat many times in an operation that is recorded as a whole are not recorded: they would push
        all other records out.
        """
        entry = journal.record_own(label, communicators.stack().levels[0]) if is_recorded else None
        with self._lock:
            return self._thread.submit(_Request(label, begin, end, entry, uses))

    def drain(self) -> None:
        """Wait until all queued requests are done, and end the thread."""
        with self._lock:
            self._thread.close()

    free = abandon = drain
