"""The service of a node: a thread that works on the node's shards for the ranks of other nodes.

It runs in the first rank of the node, as long as there are servers that spread over nodes. It looks for messages in
naps, which grow to 2 ms when there are none: an idle service costs less than a hundredth of a processor, and the first
request after a while finds it asleep that long.

Requests are taken in the order in which they come, but a read never waits for a payload: of those only a few are on
their way at a time, and a rank that is slow to deliver its own holds up none that come after. So a stream of sends
starves no one. A request that cannot be carried out is answered with the reason; the service goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from torchmpi_py import exits
from torchmpi_py.paramserver import rules
from torchmpi_py.paramserver.messages import (
    HEADER_TAG,
    Answer,
    Kind,
    Links,
    Request,
    answer_tag,
    as_bytes,
    payload_tag,
    portable,
)
from torchmpi_py.paramserver.store import Store
from torchmpi_py.waiting import Nap

logger = logging.getLogger("torchmpi_py")

_LONGEST_NAP_SECONDS = 0.002
_MOST_ARRIVING = 4  # payloads on their way at a time: they bound the memory that the service takes


class _Arriving:
    """A request whose payload is on its way."""

    def __init__(self, client: int, request: Request, links: Links) -> None:
        self.client, self.request = client, request
        self.bytes = torch.empty(request.num_bytes, dtype=torch.uint8)
        self.transfer = links.requests.Irecv(as_bytes(self.bytes), client, payload_tag(request.shard))


class Service:
    """Serves the stores that are added to it; its thread ends when none is left."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._stores: dict[int, Store] = {}
        self._waiting: deque[tuple[int, Request]] = deque()
        self._arriving: list[_Arriving] = []
        self._leaving: list[tuple[Any, object]] = []  # answers on their way, with the memory that they come from
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()

    def add(self, number: int, store: Store) -> None:
        """Serve a store."""
        self._stores[number] = store
        if self._thread is None:
            self._is_ending.clear()
            self._thread = threading.Thread(target=self._run, name="torchmpi_py-parameter-service", daemon=True)
            self._thread.start()

    def remove(self, number: int) -> None:
        """Serve it no longer; all that was asked of it has been answered."""
        del self._stores[number]
        if not self._stores and self._thread is not None:
            self._is_ending.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            nap = Nap(_LONGEST_NAP_SECONDS)
            while not (self._is_ending.is_set() and not self._leaving):
                if self._turn():
                    nap.begin()
                else:
                    nap.take()
        except BaseException:
            logger.exception("the service of parameter servers failed: ranks of other nodes would wait for ever")
            exits.abort(1)

    def _turn(self) -> bool:
        """Do what can be done now; whether there was anything."""
        self._leaving = [answer for answer in self._leaving if not answer[0].Test()]
        busy = self._take_headers()
        here, self._arriving = self._arriving, []
        for arriving in here:
            if arriving.transfer.Test():
                self._carry_out(arriving.client, arriving.request, arriving.bytes)
                busy = True
            else:
                self._arriving.append(arriving)
        return busy

    def _take_headers(self) -> bool:
        """Take all requests that have come, and do what needs no payload; payloads may come where there is room."""
        while (message := self._links.requests.improbe(tag=HEADER_TAG, status=(status := _status()))) is not None:
            self._waiting.append((status.source, message.recv()))
        before = len(self._waiting)
        for _ in range(before):
            client, request = self._waiting.popleft()
            if request.kind is not Kind.APPLY or request.num_bytes == 0:
                self._carry_out(client, request, None)
            elif len(self._arriving) < _MOST_ARRIVING:
                self._arriving.append(_Arriving(client, request, self._links))
            else:
                self._waiting.append((client, request))
        return len(self._waiting) < before

    def _carry_out(self, client: int, request: Request, payload: Tensor | None) -> None:
        """Do what is asked, and answer."""
        state = None
        try:
            with self._stores[request.server].held(request.shard) as shard:
                if request.kind is Kind.APPLY:
                    values = shard.values[:0] if payload is None else payload.view(shard.values.dtype)
                    shard.apply(rules.named("send", request.rule), values, request.options)
                elif request.kind is Kind.RESTORE:
                    shard.restore(request.state)
                elif request.kind is Kind.SAVE:
                    state = shard.state()
                else:
                    self._send_values(client, request, shard.values.clone())
            answer = Answer(None, state)
        except Exception as error:
            answer = Answer(portable(error))
        self._leaving.append((self._links.answers.isend(answer, client, answer_tag(request.shard)), answer))

    def _send_values(self, client: int, request: Request, values: Tensor) -> None:
        sent = self._links.answers.Isend(as_bytes(values), client, payload_tag(request.shard))
        self._leaving.append((sent, values))


def _status() -> Any:
    from mpi4py import MPI

    return MPI.Status()
