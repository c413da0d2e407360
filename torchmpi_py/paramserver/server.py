"""A parameter server: a tensor whose shards lie with the ranks of a communicator.

On a node no rank serves: the shards are in memory that all ranks map, and a rank that sends or receives works on them
directly, one after another, each under its lock (``store.py``). A rank begins with its own shard, so that ranks which
start together do not queue. For the shards of another node it asks the service of that node (``remote.py``). All
requests of a rank run in one thread of that rank, in the order in which they are made: a receive sees what the same
rank has sent before, without waiting.

After TorchMPI's (reference section 5), where each rank served its shard from a thread that polled, and a send that was
not waited for could be overtaken.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core import agree, communication_thread, communicators, journal
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import Handle
from torchmpi_py.core.tensors import check_tensor, flat, output_buffer
from torchmpi_py.errors import ParameterServerError, RanksDisagree, Unavailable
from torchmpi_py.memory.devices import HostCopy
from torchmpi_py.paramserver import rules, shard
from torchmpi_py.paramserver.request_thread import Answers, RequestThread, Uses
from torchmpi_py.paramserver.shard import Shard
from torchmpi_py.paramserver.shard_router import ShardRouter

_servers: list[ParameterServer] = []  # in the order in which they were made


def init(tensor: Tensor, *, comm: Communicator | None = None, optimizer: str | None = None) -> ParameterServer:
    """A server for a tensor of this shape and dtype. Collective over ``comm`` (default: the current level).

    The flat tensor is cut into as many parts as there are ranks (fewer elements than ranks will do). Rank r holds part
    r, on the host, and seeds it from its own ``tensor``, which is not kept; all parts are seeded on return. The server
    lives until ``free``, ``free_all``, or the end of its communicator, and takes a file descriptor before Python 3.13.

    Args:
        tensor: this rank's first values, with the same shape and dtype on every rank.
        comm: communicator whose ranks hold the parts (default: the current level).
        optimizer: the server keeps the state of this optimizer, so that ``send(grad, rule=optimizer)`` makes one step
            of it: "sgd", "adagrad", "adam", or a name that ``register_rule`` registered with ``num_slots``.

    Raises TypeError or ValueError for an unknown optimizer or anything but a dense tensor on the CPU or a GPU,
    RanksDisagree if the ranks give different shapes, dtypes or optimizers, Unavailable if a node cannot share memory,
    or the ranks are on several nodes and MPI does not give MPI_THREAD_MULTIPLE; each on every rank.
    """
    comm = resolve(comm)
    source, num_slots = journal.run_together("paramserver.init", comm, lambda: _agreed(tensor, optimizer, comm))
    if comm.num_nodes > 1 and communication_thread.current().inline:
        raise Unavailable(
            f"paramserver.init: {comm!r} is on several nodes, and this MPI does not give MPI_THREAD_MULTIPLE, which "
            "the service between nodes needs; give a communicator within a node, such as mpi.communicator(1)"
        )
    server = ParameterServer(comm, source, optimizer, num_slots)
    _servers[:] = [*(other for other in _servers if not other._router.is_free), server]
    return server


def free_all() -> None:
    """Free all servers, in the order in which they were made. All ranks of each one call it."""
    for server in list(_servers):
        server.free()


def _agreed(tensor: Tensor, optimizer: str | None, comm: Communicator) -> tuple[Tensor, int]:
    """(the flat tensor, the optimizer's number of slots); shape, dtype and optimizer are equal on all ranks.

    Collective. An error of one rank's arguments is raised on every rank.
    """

    def checked() -> tuple[Tensor, int]:
        source = flat(_on_known_device("paramserver.init", tensor))
        return source, 0 if optimizer is None else rules.optimizer(optimizer).num_slots

    allgather = comm.direct.mpi.allgather
    caught = TypeError, ValueError
    source, num_slots = agree.run_on_all_ranks(allgather, checked, caught, agree.kind_and_text, agree.same_error)
    kind = f"{list(source.shape)} {source.dtype}"
    if optimizer is not None:
        kind += f" for {optimizer!r} of {num_slots} slots"
    kinds = allgather(kind)
    if agree.first_different(kinds) is not None:
        by_rank = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise RanksDisagree(f"paramserver.init: the ranks give different tensors ({by_rank})")
    return source, num_slots


class ParameterServer:
    """A tensor in shards, made by ``init``. A rank sends and receives without the others; ``free`` is collective.

    ``shape`` and ``dtype`` are those of the tensor; ``bounds`` are (begin, end) of the elements that each rank holds;
    ``num_bytes_sent`` and ``num_bytes_received`` count what this rank has exchanged with shards, its own included.
    """

    def __init__(self, comm: Communicator, source: Tensor, optimizer: str | None, num_slots: int) -> None:
        self.shape, self.dtype, self.optimizer = source.shape, source.dtype, optimizer
        self.num_bytes_sent = self.num_bytes_received = 0
        self._comm, self._channel = comm, comm.direct
        self._requests = communicators.stack().levels[0].direct.keep(RequestThread, RequestThread)
        seed = source.view(-1).cpu()
        self._router = journal.run_together(
            "paramserver.init",
            comm,
            lambda: comm.direct.keep(self, lambda channel: ShardRouter(channel, seed, num_slots, self._requests)),
        )
        self.bounds = list(self._router.bounds)

    def send(self, tensor: Tensor, rule: str = "add", **options: Any) -> Handle[Tensor]:
        """Apply a rule to every shard, with the part of ``tensor`` that belongs to it; ``wait`` returns ``tensor``.

        Rules: zero, copy, add, scaled_add (with ``scale=``), average, elastic (with ``weight=``), the server's
        optimizer with its options, and those that ``register_rule`` has added. A shard takes a send as a whole;
        different shards may take the sends of several ranks in different orders. When the handle is complete the rule
        has been applied, once. Until then ``tensor`` must not be changed.

        Raises TypeError or ValueError for another shape or dtype, an unknown rule, or options that the rule does not
        take; ParameterServerError after ``free``. ``wait`` raises the errors of the rule; the other shards take the
        send.
        """
        known = rules.checked(rule, options, self.dtype, self.optimizer)
        payload = self._checked("send", tensor).detach()
        on_host = payload.device.type == "cpu" or not known.needs_payload
        copy = None if on_host else HostCopy(payload)

        def begin(answers: Answers) -> None:
            nonlocal payload
            # Not at the call: a request under way may still have to write to the tensor of which this is a copy.
            payload = (flat(payload) if copy is None else copy.to_host()).view(-1)
            self._router.apply(rule, known, options, payload, answers)

        def end() -> Tensor:
            self.num_bytes_sent += payload.nbytes if known.needs_payload else 0
            return tensor

        return self._requests.submit(f"send to a parameter server, rule {rule}", begin, end, Uses(self, payload))

    def receive(self, tensor: Tensor | None = None) -> Handle[Tensor]:
        """Fetch all shards into ``tensor`` (default: a new one on the CPU), which ``wait`` returns.

        Each shard is copied between two sends, perhaps at different times. It contains what this rank has sent before,
        and the sends that were complete on other ranks. Raises as ``send`` does.
        """
        target = torch.empty(self.shape, dtype=self.dtype, device="cpu") if tensor is None else tensor
        buffer, copy_out = output_buffer("receive", self._checked("receive", target), holds_input=False)
        line = host = buffer.view(-1)
        copy = HostCopy(line) if line.device.type != "cpu" else None

        def begin(answers: Answers) -> None:
            nonlocal host
            host = line if copy is None else copy.empty()
            self._router.read(host, answers)

        def end() -> Tensor:
            self.num_bytes_received += line.nbytes
            if copy is not None:
                copy.from_host(host, copy_out)
            elif copy_out is not None:
                copy_out()
            return target

        return self._requests.submit("receive from a parameter server", begin, end, Uses(self, target, True))

    def peek(self, target: Tensor) -> None:
        """Receive into a tensor on the CPU, wait, and leave no record: for a loop that looks again and again."""
        begin = functools.partial(self._router.read, target)
        label = "look at a parameter server"
        self._requests.submit(label, begin, _nothing, Uses(self, target, True), is_recorded=False).wait()

    def take_in(self, source: ParameterServer, rule: str = "add", **options: Any) -> Handle[None]:
        """Apply a rule to this rank's own shard with its shard of the server ``source``, which becomes zero.

        For synchronous updates: all ranks send gradients to ``source`` and wait for each other; then every rank does
        the step of its part. ``source`` has the same number of elements, dtype and communicator. Raises as ``send``
        does.
        """
        known = rules.checked(rule, options, self.dtype, self.optimizer)
        for server in (self, source):
            server._check_alive("take_in")
        # Part for part both servers hold the same elements, on the same ranks.
        alike = (source._channel, source.bounds, source.dtype) == (self._channel, self.bounds, self.dtype)
        if source is self or not alike:
            raise ValueError(
                "take_in: source must be another server of as many elements, the same dtype and communicator"
            )
        label = f"step of this rank's shard, rule {rule}"
        return self._requests.submit(
            label, lambda answers: self._router.take_in(source._router, known, options), _nothing, Uses(self)
        )

    def state_dict(self) -> dict[str, Any]:
        """The values and the optimizer's slots of all shards, to be saved with ``torch.save`` by any one rank.

        Each shard is copied between two sends. For one moment of all shards call ``mpi.barrier`` before and after.
        """
        self._check_alive("state_dict")
        saved = self._router.new_shards()
        begin = functools.partial(self._router.save, saved)
        self._requests.submit("save a parameter server", begin, _nothing, Uses(self)).wait()
        return shard.joined(list(saved.values()), self.shape, self.dtype, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that was saved on any number of ranks. One rank calls it, and the others go on after it.

        ValueError if it was saved from a server of another shape, dtype or optimizer.
        """
        self._check_alive("load_state_dict")
        parts = self._parted(state)
        begin = functools.partial(self._router.restore, parts)
        self._requests.submit("restore a parameter server", begin, _nothing, Uses(self)).wait()

    def check_state(self, state: dict[str, Any]) -> None:
        """ValueError if ``load_state_dict`` would refuse the state."""
        self._parted(state)

    def _parted(self, state: dict[str, Any]) -> list[Shard]:
        return shard.parted(state, self.bounds, self.shape, self.dtype, self.optimizer, self._router.num_slots)

    def free(self) -> None:
        """Free the memory, once every rank has called ``free`` and all requests are done. Collective; idempotent.

        A rank sleeps until the others call it too: a rank that only serves others calls it at once. Raises
        RanksDisagree, on every rank, if one frees another server; then none is freed.
        """
        try:
            if not self._router.is_free:
                communicators.stack()  # NotStarted in a forked child
                journal.run_while_others_work("ParameterServer.free", self._comm, lambda: self._channel.give_back(self))
        finally:
            if self in _servers and (self._router.is_free or self._comm.is_broken):
                _servers.remove(self)

    def _check_alive(self, call: str) -> None:
        communicators.stack()  # neither in a child process nor after stop
        if self._router.is_free:
            raise ParameterServerError(
                f"{call}: this parameter server was freed, or lost when a rank died; make another with paramserver.init"
            )

    def _checked(self, call: str, tensor: Tensor) -> Tensor:
        self._check_alive(call)
        x = _on_known_device(call, tensor)
        if x.dtype != self.dtype or x.shape != self.shape:
            view = f"; pass a view of shape {tuple(self.shape)}" if x.numel() == self.shape.numel() else ""
            raise ValueError(
                f"{call}: the tensor has shape {tuple(x.shape)} and {x.dtype}, but the parameter server has "
                f"{tuple(self.shape)} and {self.dtype}{view if x.dtype == self.dtype else ''}"
            )
        return x


def _on_known_device(call: str, tensor: object) -> Tensor:
    x = check_tensor(call, "tensor", tensor)
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{call}: the tensor is on {x.device}; give one on the CPU or a CUDA device")
    return x


def _nothing() -> None:
    """The result of a request that has none."""
