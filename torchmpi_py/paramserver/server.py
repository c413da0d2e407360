"""A parameter server: a tensor whose shards are distributed over the ranks of a communicator.

Within a node, no rank acts as a server. All ranks of the node map the memory of the shards, and a rank that sends or
receives works on each shard directly while it holds the shard's lock (``store.py``). A rank starts with its own shard,
so ranks that start simultaneously do not queue for the same lock. For a shard on another node, the rank sends a request
to the service of that node (``remote.py``). All requests of a rank run in one thread of that rank, in the order of the
calls. So a receive returns values that contain all earlier sends of the same rank, even if the rank did not wait for
these sends.

The alternative is TorchMPI's design (reference section 5): each rank serves its shard from a thread that polls. A
polling thread takes time from training, and in that design a receive could overtake an earlier send of the same rank.
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

_servers: list[ParameterServer] = []  # in the order of their creation


def init(tensor: Tensor, *, comm: Communicator | None = None, optimizer: str | None = None) -> ParameterServer:
    """Create a parameter server for a tensor. All ranks of ``comm`` must call it.

    The flat tensor is cut into one shard per rank. The sizes of shards differ by at most one element, and a shard may
    be empty. Rank r holds shard r in host memory, and fills it from its own ``tensor``. All shards are filled when the
    function returns. The server exists until ``free``, ``free_all`` or the end of its communicator. Before Python 3.13,
    each server uses one file descriptor.

    Args:
        tensor (Tensor): initial values: a dense tensor on the CPU or a GPU, with the same shape and dtype on every
            rank. The server copies the values.
        comm (Communicator): communicator whose ranks hold the shards. Default None, the current level.
        optimizer (str): optimizer whose state the server keeps: "sgd", "adagrad", "adam", or a name that
            ``register_rule`` registered with ``num_slots``. ``send(grad, rule=optimizer)`` then takes one step of this
            optimizer. Default None, no optimizer.

    Returns:
        The server.

    Raises:
        TypeError: ``tensor`` is not a dense tensor. Every error in this list is raised on every rank.
        ValueError: the optimizer is unknown, or the tensor is neither on the CPU nor on a CUDA device.
        RanksDisagree: the ranks pass different shapes, dtypes or optimizers.
        Unavailable: the ranks of a node cannot share memory; or the ranks are on several nodes, and MPI does not
            provide MPI_THREAD_MULTIPLE.

    Examples:
        >>> server = mpi.paramserver.init(torch.zeros(1000))
        >>> sent = server.send(torch.ones(1000), rule="add").wait()
        >>> mpi.barrier()  # The next line expects the sends of all ranks.
        >>> server.receive().wait().eq(mpi.size()).all().item()
        True
        >>> server.free()
    """
    comm = resolve(comm)
    source, num_slots = journal.run_together("paramserver.init", comm, lambda: _agreed(tensor, optimizer, comm))
    if comm.num_nodes > 1 and communication_thread.current().inline:
        raise Unavailable(
            f"paramserver.init: {comm!r} has ranks on several nodes, so the server needs MPI_THREAD_MULTIPLE, which "
            "this MPI does not provide; pass a communicator within a node, such as comm=mpi.communicator(1)"
        )
    server = ParameterServer(comm, source, optimizer, num_slots)
    _servers[:] = [*(other for other in _servers if not other._router.is_free), server]
    return server


def free_all() -> None:
    """Free all parameter servers, in the order of their creation. All ranks of each server must call it.

    Raises:
        RanksDisagree: the ranks free different servers, because they did not create the servers in the same order.
    """
    for server in list(_servers):
        server.free()


def _agreed(tensor: Tensor, optimizer: str | None, comm: Communicator) -> tuple[Tensor, int]:
    """Check the arguments of ``init`` on all ranks; return the flat tensor and the optimizer's number of slots.

    All ranks of ``comm`` must call it. An error in the arguments of one rank is raised on every rank.
    """

    def checked() -> tuple[Tensor, int]:
        source = flat(_on_known_device("paramserver.init", tensor))
        return source, 0 if optimizer is None else rules.optimizer(optimizer).num_slots

    allgather = comm.direct.mpi.allgather
    caught = TypeError, ValueError
    source, num_slots = agree.run_on_all_ranks(allgather, checked, caught, agree.kind_and_text, agree.same_error)
    kind = f"{list(source.shape)} {source.dtype}"
    if optimizer is not None:
        kind += f" for optimizer {optimizer!r} with num_slots={num_slots}"
    kinds = allgather(kind)
    if agree.first_different(kinds) is not None:
        by_rank = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise RanksDisagree(f"paramserver.init: arguments differ ({by_rank}); pass one shape, dtype and optimizer")
    return source, num_slots


class ParameterServer:
    """A parameter server: a tensor that is divided into shards, one per rank. Create a server with ``init``.

    Any rank may send and receive at any time, without a call on the other ranks. All ranks must call ``free``.

    Attributes:
        shape (torch.Size): shape of the whole tensor.
        dtype (torch.dtype): dtype of the tensor.
        optimizer (str): name of the optimizer whose state the server keeps, or None.
        bounds (list): for each rank, the (begin, end) of its shard in the flat tensor.
        num_bytes_sent (int): number of bytes that this rank has sent to shards, including its own.
        num_bytes_received (int): number of bytes that this rank has received from shards, including its own.
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
        """Send a tensor, which a rule combines with the values of the server. Any rank may call it, at any time.

        Each shard applies the rule to its part of the tensor, exactly once and without interruption. Different shards
        may apply the sends of several ranks in different orders. When the handle is complete, the rule has been applied
        to all shards. Do not change ``tensor`` before the handle is complete.

        Args:
            tensor (Tensor): tensor on the CPU or a GPU, with the shape and dtype of the server.
            rule (str): operation that each shard applies. "add" (default) adds the tensor, "copy" replaces the values
                by the tensor, "zero" sets the values to 0, and "scaled_add" adds ``scale * tensor``. The rule "elastic"
                moves the values towards the tensor by the fraction ``weight`` of the distance. The rule "average" sets
                the values to the mean of all sends since the last send with a different rule. The name of the server's
                optimizer takes one step with the tensor as the gradient. Names from ``register_rule`` are also valid.
            **options: options of the rule: ``scale=`` for "scaled_add", ``weight=`` for "elastic", and the options of
                the optimizer, such as ``lr=0.1``.

        Returns:
            A handle whose ``wait()`` returns ``tensor``, or raises an error of the rule. Even if the rule fails on some
            shards, the other shards apply the send.

        Raises:
            TypeError: ``tensor`` is not a dense tensor, or the rule does not accept the options.
            ValueError: the shape or dtype differs from the server's, the rule is unknown, or an option has an invalid
                value.
            ParameterServerError: the server was freed.

        Examples:
            >>> server = mpi.paramserver.init(torch.zeros(4), optimizer="sgd")
            >>> handle = server.send(torch.ones(4), rule="sgd", lr=0.5)
            >>> handle.wait()
            tensor([1., 1., 1., 1.])
            >>> server.free()
        """
        known = rules.checked(rule, options, self.dtype, self.optimizer)
        payload = self._checked("send", tensor).detach()
        on_host = payload.device.type == "cpu" or not known.needs_payload
        copy = None if on_host else HostCopy(payload)

        def begin(answers: Answers) -> None:
            nonlocal payload
            # Copy here and not when send is called, because an earlier request may still write to the tensor.
            payload = (flat(payload) if copy is None else copy.to_host()).view(-1)
            self._router.apply(rule, known, options, payload, answers)

        def end() -> Tensor:
            self.num_bytes_sent += payload.nbytes if known.needs_payload else 0
            return tensor

        return self._requests.submit(f"send to a parameter server, rule {rule}", begin, end, Uses(self, payload))

    def receive(self, tensor: Tensor | None = None) -> Handle[Tensor]:
        """Fetch the values of all shards. Any rank may call it, at any time. **Overwrites** ``tensor``.

        The values contain every send of this rank before the call, and every send of another rank that was complete
        before the call. No shard is read in the middle of a send, but different shards may be read at different times.

        Args:
            tensor (Tensor): tensor for the values, on the CPU or a GPU, with the shape and dtype of the server. Do not
                use it before the handle is complete. Default None, a new tensor on the CPU.

        Returns:
            A handle whose ``wait()`` returns the tensor with the values.

        Raises:
            TypeError: ``tensor`` is not a dense tensor.
            ValueError: the shape or dtype of ``tensor`` differs from the server's.
            ParameterServerError: the server was freed.
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
        """Receive into a tensor on the CPU, and wait. The call is not recorded, so that loops can use it to poll.

        Args:
            target (Tensor): flat, contiguous tensor on the CPU, with the size and dtype of the server. It is
                overwritten.
        """
        begin = functools.partial(self._router.read, target)
        label = "look at a parameter server"
        self._requests.submit(label, begin, _nothing, Uses(self, target, True), is_recorded=False).wait()

    def take_in(self, source: ParameterServer, rule: str = "add", **options: Any) -> Handle[None]:
        """Apply a rule to this rank's own shard, with this rank's shard of another server as the payload.

        **Overwrites** the shard of ``source`` with zeros. Use this method for synchronous training: all ranks send
        gradients to ``source`` and synchronize. Then each rank takes the optimizer's step for its own shard.

        Args:
            source (ParameterServer): another server, with the same number of elements, dtype and communicator.
            rule (str): rule, as for ``send``. Default "add".
            **options: options of the rule, as for ``send``.

        Returns:
            A handle whose ``wait()`` returns None.

        Raises:
            TypeError: the rule does not accept the options.
            ValueError: the rule is unknown, or ``source`` does not match this server.
            ParameterServerError: this server or ``source`` was freed.
        """
        known = rules.checked(rule, options, self.dtype, self.optimizer)
        for server in (self, source):
            server._check_alive("take_in")
        # Equal bounds on the same channel mean that each rank holds the same elements of both servers.
        is_match = (source._channel, source.bounds, source.dtype) == (self._channel, self.bounds, self.dtype)
        if source is self or not is_match:
            raise ValueError(
                "take_in: wrong source; pass another server with the same number of elements, dtype and communicator"
            )
        label = f"step of this rank's shard, rule {rule}"
        return self._requests.submit(
            label, lambda answers: self._router.take_in(source._router, known, options), _nothing, Uses(self)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the values and the optimizer's state of all shards. Any rank may call it alone, at any time.

        No shard is read in the middle of a send, but different shards may be read at different times. For a consistent
        state, wait for all sends, and call ``mpi.barrier`` on all ranks before and after this call.

        Returns:
            A dictionary for ``torch.save`` and ``load_state_dict``.

        Raises:
            ParameterServerError: the server was freed.
        """
        self._check_alive("state_dict")
        saved = self._router.new_shards()
        begin = functools.partial(self._router.save, saved)
        self._requests.submit("save a parameter server", begin, _nothing, Uses(self)).wait()
        return shard.joined(list(saved.values()), self.shape, self.dtype, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, even from a job with a different number of ranks. **Overwrites** all shards.

        Call this method on one rank. The other ranks must not use the server until the call has returned, so call
        ``mpi.barrier`` on all ranks afterwards.

        Args:
            state (dict): dictionary that ``state_dict`` returned.

        Raises:
            ValueError: the state belongs to a server of a different shape, dtype or optimizer.
            ParameterServerError: the server was freed.
        """
        self._check_alive("load_state_dict")
        parts = self._parted(state)
        begin = functools.partial(self._router.restore, parts)
        self._requests.submit("restore a parameter server", begin, _nothing, Uses(self)).wait()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless ``load_state_dict`` accepts a state. The server does not change.

        Args:
            state (dict): dictionary that ``state_dict`` returned.

        Raises:
            ValueError: the state belongs to a server of a different shape, dtype or optimizer.
        """
        self._parted(state)

    def _parted(self, state: dict[str, Any]) -> list[Shard]:
        return shard.parted(state, self.bounds, self.shape, self.dtype, self.optimizer, self._router.num_slots)

    def free(self) -> None:
        """Free the memory after all ranks have called ``free`` and all requests are complete.

        All ranks of the server must call it, and each rank sleeps until the other ranks also call it. So a rank that
        has finished its work can call ``free`` early, and the other ranks can still use its shard. Repeated calls have
        no effect.

        Raises:
            RanksDisagree: the ranks free different servers. The error is raised on every rank, and no server is freed.
        """
        try:
            if not self._router.is_free:
                communicators.stack()  # This raises NotStarted in a forked child.
                journal.run_while_others_work("ParameterServer.free", self._comm, lambda: self._channel.give_back(self))
        finally:
            if self in _servers and (self._router.is_free or self._comm.is_broken):
                _servers.remove(self)

    def _check_alive(self, call: str) -> None:
        communicators.stack()  # This raises NotStarted in a forked child and after stop.
        if self._router.is_free:
            raise ParameterServerError(
                f"{call}: the server was freed, or lost when a rank died; create a new server with paramserver.init"
            )

    def _checked(self, call: str, tensor: Tensor) -> Tensor:
        self._check_alive(call)
        x = _on_known_device(call, tensor)
        if x.dtype != self.dtype or x.shape != self.shape:
            view = "a view" if x.numel() == self.shape.numel() else "a tensor"
            raise ValueError(
                f"{call}: the tensor has shape {tuple(x.shape)} and {x.dtype}, but must match the parameter server; "
                f"pass {view if x.dtype == self.dtype else 'a tensor'} of shape {tuple(self.shape)} and {self.dtype}"
            )
        return x


def _on_known_device(call: str, tensor: object) -> Tensor:
    x = check_tensor(call, "tensor", tensor)
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{call}: the tensor is on {x.device}; pass a tensor on the CPU or a CUDA device")
    return x


def _nothing() -> None:
    """Return None, the result of a request without a result."""
