"""The thread that runs a rank's requests to parameter servers, in the order of the calls.

A request first sends messages to other nodes, and then works on the shards of this node. It is complete when all
replies have arrived, but the next request to the same server may start earlier. So a request to other nodes costs a
round trip only if the program waits for the request. Each shard carries out the requests of a rank in order, and the
handles of a rank complete in the same order. The alternative, completing each request before the next one starts, would
add a round trip to every request.

A request to another server starts only when all earlier requests are complete, because a program may use one server to
announce that it has sent to another server. Bounded staleness does this with its clocks. A request also waits for all
earlier requests if it uses a tensor that a pending request writes, or writes a tensor that a pending request reads.
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
_MOST_UNDER_WAY = 64  # A service stores the messages of pending requests, so their number is limited.
_LONGEST_NAP_SECONDS = 0.0001  # longest sleep between two checks for a reply


class Answers:
    """The current outcome of a request: its errors, and the replies that it expects from other nodes."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []
        self._replies: list[tuple[Client, PendingReply]] = []

    def attempt(self, work: Callable[[], object]) -> None:
        """Run one part of the request. Store an exception instead of raising it, so that the other parts still run."""
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def expect(self, client: Client, reply: PendingReply) -> None:
        """Register a reply that must arrive before the request is complete."""
        self._replies.append((client, reply))

    def clients(self) -> list[Client]:
        """Return the clients that expect a reply."""
        return [client for client, _ in self._replies]

    def are_complete(self) -> bool:
        """Return whether all replies have arrived."""
        return all(reply.is_complete for _, reply in self._replies)

    def check(self) -> None:
        """Raise the first error, if any. Errors of this node precede errors of other nodes."""
        for error in [*self._errors, *(reply.error for _, reply in self._replies)]:
            if error is not None:
                raise error


class Uses(NamedTuple):
    """The objects that a request uses: a server, and a tensor of the program, which the request reads or ``writes``."""

    server: object
    memory: Tensor | None = None
    writes: bool = False


class _Request(Work[R]):
    """A request. ``begin`` sends messages to other nodes and works on this node, and ``end`` returns the result."""

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
        """Send the messages to other nodes, and do the work on this node. Store errors; ``run`` raises them."""
        assert self._steps is not None, "a request runs once"
        if self.entry is not None:
            journal.begin(self.entry)
        begin = self._steps[0]
        self.answers.attempt(lambda: begin(self.answers))

    def run(self, in_background: bool = False) -> R:
        assert self._steps is not None, "a request runs once"
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
    """A thread that starts requests in the order of the queue, and completes them in the same order."""

    def __init__(self) -> None:
        super().__init__(inline=False, name="parameter-server")
        self._under_way: deque[ThreadHandle[Any]] = deque()
        self._server: object = None  # server of the pending requests
        self._in_use: Counter[tuple[int, bool]] = Counter()  # number of pending uses by (address, is written)
        self._clients: list[Client] = []  # clients that expect replies
        self._nap = Nap(_LONGEST_NAP_SECONDS, share=0.25)

    @torch.inference_mode()  # The caller may pass tensors that were created in inference mode.
    def _loop(self) -> None:
        end_sleeps_in_time()
        while (handle := self._next()) is not None:
            self._begin(handle)
            del handle  # Release the buffers of the request before waiting for the next request.
        while self._under_way:
            self._wait()

    def _next(self) -> ThreadHandle[Any] | None:
        """Return the next request, or None if the thread must end.

        While the queue is empty or too many requests are pending, process replies.
        """
        # Block on the queue only if no request is pending. Otherwise, the thread must check for replies.
        while self._under_way and (self._queue.empty() or len(self._under_way) >= _MOST_UNDER_WAY):
            self._wait()
        return self._queue.get()

    def _begin(self, handle: ThreadHandle[Any]) -> None:
        request = handle._work
        if isinstance(request, _Request):  # The queue may also contain an end mark.
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
        """Return whether a request must not start before all pending requests are complete."""
        # Several pending requests may read the same tensor. A request that writes a tensor excludes all other uses.
        is_written = self._in_use[request.storage, True]
        is_in_use = is_written or (request.writes and self._in_use[request.storage, False])
        return request.server is not self._server or bool(request.storage and is_in_use)

    def _wait(self) -> None:
        """Process the replies that have arrived, or sleep briefly if no reply has arrived."""
        if not self._take_replies():
            self._nap.take()

    def _take_replies(self) -> bool:
        """Process the replies that have arrived, complete requests, and return whether any reply has arrived."""
        has_moved = False
        for client in list(self._clients):
            has_moved |= client.advance()
            if client.is_idle:
                self._clients.remove(client)
        # Handles complete in the order of the requests, even if the replies arrive in a different order.
        while self._under_way and self._is_complete(self._under_way[0]._work):
            self._under_way.popleft().execute()
        if not self._under_way:
            self._server = None
        if has_moved:
            self._nap.begin()
        return has_moved

    def _is_complete(self, work: Work[Any] | None) -> bool:
        if not isinstance(work, _Request):
            return True  # An end mark expects no replies.
        if is_complete := work.answers.are_complete():
            key = work.storage, work.writes
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]
        return is_complete


class RequestThread:
    """The thread that runs a rank's requests. It is stored with the channel of all ranks.

    This thread is separate from the thread of asynchronous collectives. A collective waits for other ranks, but a
    request to a parameter server must not. The thread starts with the first request, ends when a server is freed, and
    starts again with the next request.
    """

    def __init__(self, world: Channel) -> None:
        self._lock = threading.Lock()  # No request may be queued on a thread that is about to end.
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
        """Queue a request, and return its handle.

        The thread calls ``begin``, which sends messages and registers the expected replies in its argument. When all
        expected replies have arrived, the thread calls ``end``, which returns the result of the handle. Pass
        ``is_recorded=False`` for a request that a longer operation repeats many times. The records of such requests
        would displace all other records in the flight recorder, and the longer operation has its own record.
        """
        entry = journal.record_own(label, communicators.stack().levels[0]) if is_recorded else None
        with self._lock:
            return self._thread.submit(_Request(label, begin, end, entry, uses))

    def drain(self) -> None:
        """Wait until all queued requests are complete, and end the thread."""
        with self._lock:
            self._thread.close()

    free = abandon = drain
