"""A parameter server: a tensor whose shards lie with the ranks of a communicator.

On a node no rank serves: the shards are in memory that all ranks map, and whoever sends or receives works on them
itself, one after another, each under its lock (``store.py``). A rank begins with its own shard, so that ranks which
start together do not queue. All that a rank asks of its servers runs in one thread of that rank, in the order in which
it was asked: a receive sees what the same rank has sent before, without waiting.

After TorchMPI's (reference section 5), where each rank served its shard from a thread that polled, and a send that was
not waited for could be overtaken.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from torchmpi_py import communicators
from torchmpi_py.communicators import Communicator, resolve
from torchmpi_py.errors import ParameterServerError, RanksDisagree, Unavailable
from torchmpi_py.handles import Handle
from torchmpi_py.paramserver import client, rules
from torchmpi_py.paramserver.store import Store
from torchmpi_py.tensors import check_tensor, flat, written

_numbers = itertools.count()
_servers: list[ParameterServer] = []  # in the order in which they were made


def init(tensor: Tensor, *, comm: Communicator | None = None) -> ParameterServer:
    """A server for a tensor of this shape and dtype. Collective over ``comm`` (default: the current level).

    The flat tensor is cut into as many parts as there are ranks (fewer elements than ranks will do). Rank r holds part
    r, and seeds it from its own ``tensor``, which is not kept; all parts are seeded when this returns. The server lives
    until ``free``, ``free_all``, or the end of its communicator.

    Raises TypeError or ValueError for what is not a dense CPU tensor, RanksDisagree if the ranks give different shapes
    or dtypes, Unavailable if they are on several nodes (not there yet) or cannot share memory; each on every rank.
    """
    comm = resolve(comm)
    source = flat(_on_host("paramserver.init", tensor))
    asked = comm.direct.mpi.allgather((tuple(source.shape), str(source.dtype)))
    if any(other != asked[0] for other in asked):
        told = ", ".join(f"rank {rank}: {list(shape)} {dtype}" for rank, (shape, dtype) in enumerate(asked))
        raise RanksDisagree(f"paramserver.init: the ranks give different tensors ({told})")
    if comm.num_nodes > 1:
        raise Unavailable(
            f"paramserver.init: {comm!r}: parameter servers stay within a node for now; give a communicator that does, "
            "such as mpi.communicator(1)"
        )
    server = ParameterServer(comm, source)
    _servers.append(server)
    return server


def free_all() -> None:
    """Free all servers, in the order in which they were made. All ranks of each one call it."""
    for server in list(_servers):
        server.free()


class ParameterServer:
    """A tensor in shards, made by ``init``. To send and receive is each rank's own affair, to free is collective.

    ``shape`` and ``dtype`` are those of the tensor; ``bounds`` tells, for each rank, which elements of it it holds.
    """

    def __init__(self, comm: Communicator, source: Tensor) -> None:
        self.shape, self.dtype = source.shape, source.dtype
        self._channel, self._key = comm.direct, ("parameter server", next(_numbers))
        self._store = comm.direct.keep(self._key, lambda channel: Store(channel, source.view(-1)))
        self.bounds = list(self._store.bounds)

    def send(self, tensor: Tensor, rule: str = "add", **options: Any) -> Handle[Tensor]:
        """Apply a rule to every shard, with the part of ``tensor`` that belongs to it; ``wait`` returns ``tensor``.

        Rules: zero, copy, add, scaled_add (with ``scale=``), elastic (with ``weight=``), and what ``register_rule`` has
        added. A shard takes a send as a whole; different shards may take those of several ranks in different orders.
        When the handle is complete the rule has been applied, once. Until then ``tensor`` must not be changed.

        Raises TypeError or ValueError for another size, dtype or device, an unknown rule, or options that it does not
        take; ParameterServerError after ``free``. What the rule raises comes out of ``wait``.
        """
        apply = rules.checked(rule, options)
        payload = flat(self._checked("send", tensor)).view(-1)

        def step() -> Tensor:
            self._store.visit(lambda shard, begin, end: apply(shard, payload[begin:end], **options))
            return tensor

        return client.submit(f"send to a parameter server, rule {rule}", step)

    def receive(self, tensor: Tensor | None = None) -> Handle[Tensor]:
        """Fetch all shards into ``tensor`` (default: a new one), which ``wait`` returns.

        Each shard comes as it was between two sends, perhaps of different times. It contains what this rank has sent
        before, and what was complete on other ranks. Raises as ``send`` does.
        """
        target = torch.empty(self.shape, dtype=self.dtype, device="cpu") if tensor is None else tensor
        buffer, copy_out = written("receive", self._checked("receive", target), holds_input=False)
        line = buffer.view(-1)

        def step() -> Tensor:
            self._store.visit(lambda shard, begin, end: line[begin:end].copy_(shard))
            if copy_out is not None:
                copy_out()
            return target

        return client.submit("receive from a parameter server", step)

    def free(self) -> None:
        """Give the memory back, once every rank has called it and what all asked is done. Collective; idempotent."""
        if self in _servers:
            _servers.remove(self)
        if not self._store.is_free:
            self._channel.give_back(self._key)

    def _checked(self, call: str, tensor: Tensor) -> Tensor:
        communicators.stack()  # neither in a child process nor after stop
        if self._store.is_free:
            raise ParameterServerError(f"{call}: this parameter server was freed; make another with paramserver.init")
        x = _on_host(call, tensor)
        if x.dtype != self.dtype or x.numel() != self.shape.numel():
            raise ValueError(
                f"{call}: the tensor has shape {tuple(x.shape)} and {x.dtype}, but the parameter server has "
                f"{tuple(self.shape)} and {self.dtype}"
            )
        return x


def _on_host(call: str, tensor: object) -> Tensor:
    x = check_tensor(call, "tensor", tensor)
    if x.device.type != "cpu":
        raise ValueError(
            f"{call}: the tensor is on {x.device}; parameter servers hold CPU tensors for now: pass x.cpu()"
        )
    return x
