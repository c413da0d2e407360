"""The thread in which a rank's requests to parameter servers run, in the order in which they are made.

A request first asks other nodes and works on the shards of its own node, and is complete when the replies have come.
Meanwhile the next one begins: a request between nodes costs a round trip only where the program waits for it. The
services keep the order of what they are asked, and handles are completed in the order of the requests. A request whose
tensor one under way writes to (or reads from, if the request itself writes) begins when that one is complete.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import communicators, journal
from torchmpi_py.core.backoff import Nap
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.handles import Handle, ThreadHandle, Work
from torchmpi_py.paramserver.remote import Client, PendingReply

R = TypeVar("R")
_MOST_UNDER_WAY = 64  # requests; a service keeps the messages of those that it has not carried out
_LONGEST_NAP_SECONDS = 0.0001


class Answers:
    """What has come of a request: errors, and replies of other nodes."""

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


class _Request(Work[R]):
    """``begin`` asks other nodes, and does what is to do on this one; ``end`` gives the result."""

    def __init__(
        self,
        label: str,
        begin: Callable[[Answers], object],
        end: Callable[[], R],
        memory: Tensor | None,
        writes: bool,
        entry: journal.Entry | None,
    ) -> None:
        self.entry = entry
        self.answers = Answers()
        self._label, self._writes = label, writes
        self._storage = 0 if memory is None else memory.untyped_storage().data_ptr()
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

    def has_to_wait_for(self, earlier: object) -> bool:
        """Whether the order in which two requests use their tensors matters."""
        if not isinstance(earlier, _Request):
            return False
        return self._storage == earlier._storage != 0 and (self._writes or earlier._writes)

    def release(self) -> None:
        self._steps, self.answers = None, Answers()


class _Pipeline(CommunicationThread):
    """Begins requests in the order of the queue, and completes them in that order."""

    def __init__(self) -> None:
        super().__init__(inline=False, name="parameter-server")
        self._under_way: deque[ThreadHandle[Any]] = deque()
        self._clients: list[Client] = []  # that expect replies
        self._nap = Nap(_LONGEST_NAP_SECONDS)

    @torch.inference_mode()  # in whatever mode the caller's tensors were made
    def _loop(self) -> None:
        while (handle := self._next()) is not None:
            self._begin(handle)
            del handle  # or its buffers would live until the next one
        while self._under_way:
            self._wait()

    def _next(self) -> ThreadHandle[Any] | None:
        """The next request, or the end; replies are taken meanwhile."""
        while self._under_way and (self._queue.empty() or len(self._under_way) >= _MOST_UNDER_WAY):
            self._wait()
        return self._queue.get()

    def _begin(self, handle: ThreadHandle[Any]) -> None:
        request = handle._work
        if isinstance(request, _Request):  # and not an end mark
            while any(request.has_to_wait_for(earlier._work) for earlier in self._under_way):
                self._wait()
            request.begin()
            self._clients += [client for client in request.answers.clients() if client not in self._clients]
        self._under_way.append(handle)
        self._nap.begin()
        self._take_replies()

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
        while self._under_way and _is_complete(self._under_way[0]):
            self._under_way.popleft().execute()
        if has_moved:
            self._nap.begin()
        return has_moved


def _is_complete(handle: ThreadHandle[Any]) -> bool:
    return not isinstance(handle._work, _Request) or handle._work.answers.are_complete()


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
        memory: Tensor | None = None,
        *,
        writes: bool = False,
        is_recorded: bool = True,
    ) -> Handle[R]:
        """Queue a request: what ``begin`` expects comes, then ``end`` gives the handle's result.

        ``memory`` is the program's tensor in which the request reads, or ``writes``. Requests that repeat many times
        in an operation that is recorded as a whole are not recorded: they would push all other records out.
        """
        entry = journal.record_own(label, communicators.stack().levels[0]) if is_recorded else None
        with self._lock:
            return self._thread.submit(_Request(label, begin, end, memory, writes, entry))

    def drain(self) -> None:
        """Wait until all queued requests are done, and end the thread."""
        with self._lock:
            self._thread.close()

    free = abandon = drain
