"""Parameter servers for lists of tensors, such as the parameters of a module.

All tensors of one dtype and device share one flat server, so a model of 200 small tensors costs one exchange per shard
instead of 200. Fetched values first arrive in flat buffers, and ``integrate_tensors`` passes the values to a function
that changes the tensors. The functions have the names of TorchMPI's functions (reference 5.7). TorchMPI looked up the
server of each tensor in global tables. Here, ``init_tensors`` returns an object that the other functions expect as an
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core import agree, journal
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.core.tensors import check_parts, check_tensor
from torchmpi_py.errors import ParameterServerError, RanksDisagree
from torchmpi_py.paramserver import rules
from torchmpi_py.paramserver.server import ParameterServer, init
from torchmpi_py.runtime import process


class _Pack:
    """The tensors of one dtype and device, their server, and flat buffers on that device for sends and fetches."""

    def __init__(self, tensors: Sequence[Tensor], comm: Communicator, optimizer: str | None) -> None:
        self.tensors = list(tensors)
        self.fetched = torch.cat([x.detach().reshape(-1) for x in tensors])
        self.sent = torch.empty_like(self.fetched)
        self.server: ParameterServer = init(self.fetched, comm=comm, optimizer=optimizer)
        self.sending: Handle[Tensor] | None = None
        self.sent_by: tuple[str, dict[str, Any]] = "", {}  # the rule and options of the last send
        # The first send whose error was not raised, with its rule and options.
        self.failed: tuple[Handle[Tensor], str, dict[str, Any]] | None = None

    def wait_for_sent_buffer(self) -> None:
        """Wait until ``sent`` may be filled again. The handle or ``check_sends`` raises the error of a failed send."""
        if (sending := self.sending) is None:
            return
        was_seen = sending._error_was_seen
        try:
            sending.wait()
        except BaseException as error:
            if error is not sending._error:  # After a timeout, for example, the send is still pending.
                raise
            sending._error_was_seen = was_seen
            if not was_seen and self.failed is None:
                self.failed = sending, *self.sent_by

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat buffer in the shapes of the tensors."""
        parts = torch.split(flat, [x.numel() for x in self.tensors])
        return [part.view(x.shape) for part, x in zip(parts, self.tensors, strict=True)]


class ServedTensors:
    """A list of tensors with the parameter servers that hold their values, created by ``init_tensors``.

    Attributes:
        tensors (list): the tensors, in the order of ``init_tensors``.
        packs (list): one server with its buffers for each combination of dtype and device.
        fetching (list): handles of the fetch that is in progress; empty if no fetch is in progress.
        names (list): one name per tensor, for error messages.
    """

    def __init__(self, tensors: Iterable[Tensor], comm: Communicator, optimizer: str | None) -> None:
        self.tensors = _same_on_all_ranks(tensors, comm)
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, x in enumerate(self.tensors):
            by_kind.setdefault((x.dtype, x.device), []).append(index)
        self._indices = list(by_kind.values())
        self.packs = [_Pack([self.tensors[index] for index in indices], comm, optimizer) for indices in self._indices]
        self.fetching: list[Handle[Tensor]] = []
        self.names = [f"tensor {index}" for index in range(len(self.tensors))]

    def in_packs(self, updates: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the updates grouped by pack.

        Args:
            updates (list): one tensor per served tensor, in the same order, with the same shape and dtype.

        Raises:
            ValueError: the number of updates is wrong, or an update has a wrong shape or dtype.
        """
        if len(updates) != len(self.tensors):
            raise ValueError(
                f"send_tensors: expected {len(self.tensors)} updates, found {len(updates)}; pass one update per tensor"
            )
        check_parts("send_tensors", "updates", updates)
        for index, (update, x) in enumerate(zip(updates, self.tensors, strict=True)):
            if update.shape != x.shape or update.dtype != x.dtype:
                raise ValueError(
                    f"send_tensors: update {index} has shape {tuple(update.shape)} and {update.dtype}, but its tensor "
                    f"has {tuple(x.shape)} and {x.dtype}; pass updates with the shapes and dtypes of the tensors"
                )
        return [[updates[index] for index in indices] for indices in self._indices]

    def _finish_sends(self) -> None:
        """Wait until the servers have applied all sends of this rank, and raise the error of a failed send."""
        for pack in self.packs:
            pack.wait_for_sent_buffer()
        self.check_sends()

    def check_sends(self) -> None:
        """Raise the error of failed sends whose handles the program has not waited for. Each error is raised once.

        The call blocks only if a send has failed. In that case, it waits for the sends of the other packs.

        Raises:
            ParameterServerError: a send has failed.
        """
        for pack in self.packs:
            if pack.sending is not None and pack.sending.done():
                pack.wait_for_sent_buffer()
        if not any(pack.failed for pack in self.packs):
            return
        failed, names = [], []
        for pack, indices in zip(self.packs, self._indices, strict=True):
            pack.wait_for_sent_buffer()  # The same send may also fail in other packs.
            if pack.failed is not None and not pack.failed[0]._error_was_seen:
                pack.failed[0].give_up()  # The handle need not raise the error, because this function raises it.
                failed.append(pack.failed)
                names += [self.names[index] for index in indices]
            pack.failed = None
        if failed:
            handle, rule, options = failed[0]
            error, more = handle._error, f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ParameterServerError(
                f"a send of {', '.join(names[:3])}{more} to the parameter server (rule {rule!r}, options {options}) "
                f"has failed: {type(error).__name__}: {error}. Shards on which the rule did not fail have applied "
                "the send. If the rule raised the error, correct the rule or its options"
            ) from error

    @property
    def num_bytes_sent(self) -> int:
        """Number of bytes that this rank has sent to shards."""
        return sum(pack.server.num_bytes_sent for pack in self.packs)

    @property
    def num_bytes_received(self) -> int:
        """Number of bytes that this rank has fetched from shards."""
        return sum(pack.server.num_bytes_received for pack in self.packs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all servers, and the shapes of the tensors. Any rank may call it alone.

        Returns:
            A dictionary for ``torch.save`` and ``load_state_dict``.

        Raises:
            ParameterServerError: the servers were freed.
        """
        return {"shapes": self._shapes(), "servers": [pack.server.state_dict() for pack in self.packs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. **Overwrites** the values of all servers, but not the tensors.

        Call this method on one rank. The other ranks must not use the servers until the call has returned, so call
        ``mpi.barrier`` on all ranks afterwards. If this rank has a fetch in progress, the fetched values are discarded.

        Args:
            state (dict): dictionary that ``state_dict`` returned, for tensors of the same shapes and dtypes in the
                same order.

        Raises:
            ValueError: the shapes, dtypes or optimizers differ. In this case, no server has changed.
            ParameterServerError: the servers were freed.
        """
        if state["shapes"] != self._shapes():
            raise ValueError(
                f"load_state_dict: the state was saved for tensors of shapes {state['shapes']}; pass a state that was "
                f"saved for tensors of shapes {self._shapes()}"
            )
        pairs = list(zip(self.packs, state["servers"], strict=True))
        for pack, saved in pairs:
            pack.server.check_state(saved)  # If one state is not valid, no server may change.
        wait_all(self.fetching)
        self.fetching = []  # These handles have the values from before the restore.
        for pack, saved in pairs:
            pack.server.load_state_dict(saved)

    def _shapes(self) -> list[list[int]]:
        return [list(x.shape) for x in self.tensors]

    def free(self) -> None:
        """Free the servers. All ranks must call it. Repeated calls have no effect."""
        for pack in self.packs:
            pack.server.free()


def _same_on_all_ranks(tensors: Iterable[Tensor], comm: Communicator) -> list[Tensor]:
    """Check that the tensors have the same shapes and dtypes on all ranks, and return them as a list.

    All ranks of ``comm`` must call it. Raise RanksDisagree, on every rank, if the ranks pass different shapes, dtypes
    or orders. Raise TypeError, on every rank, if an element on any rank is not a dense tensor.
    """
    dense = list[Tensor]()

    def described() -> list[str]:
        dense[:] = [check_tensor("init_tensors", f"number {index}", x) for index, x in enumerate(tensors)]
        return [f"{list(x.shape)} {x.dtype} on {x.device.type}" for x in dense]

    allgather, how = comm.direct.mpi.allgather, ((TypeError,), agree.kind_and_text, agree.same_error)
    by_rank = journal.run_together(
        "paramserver.init_tensors", comm, lambda: agree.gather_results(allgather, described, *how)
    )
    if (rank := agree.first_different(by_rank)) is not None:
        index, there, here = agree.first_difference(by_rank[rank], by_rank[0], "missing")
        raise RanksDisagree(
            f"init_tensors: tensor {index} is {here} on rank 0 and {there} on rank {rank}; pass tensors of the same "
            "shapes and dtypes, in the same order, on all ranks"
        )
    return dense


def init_tensors(
    tensors: Iterable[Tensor], *, comm: Communicator | None = None, optimizer: str | None = None
) -> ServedTensors:
    """Create parameter servers for a list of tensors. All ranks of ``comm`` must call it.

    The servers hold rank 0's values when the function returns. The tensors themselves do not change.

    Args:
        tensors (iterable of Tensor): dense tensors, such as ``network.parameters()``, with the same shapes and dtypes
            in the same order on every rank.
        comm (Communicator): communicator whose ranks hold the shards. Default None, the current level.
        optimizer (str): optimizer whose state the servers keep, as for ``init``. Default None, no optimizer.

    Returns:
        An object to pass to ``send_tensors``, ``prefetch_tensors`` and ``integrate_tensors``.

    Raises:
        TypeError: an element of ``tensors`` is not a dense tensor. Every error in this list is raised on every rank.
        ValueError: the optimizer is unknown, or a tensor is neither on the CPU nor on a CUDA device.
        RanksDisagree: the ranks pass different shapes, dtypes, orders or optimizers.
        Unavailable: the ranks of a node cannot share memory; or the ranks are on several nodes, and MPI does not
            provide MPI_THREAD_MULTIPLE.

    Examples:
        >>> network = torch.nn.Linear(10, 2)
        >>> served = mpi.paramserver.init_tensors(network.parameters())
        >>> updates = [torch.full_like(p, 0.1) for p in network.parameters()]
        >>> sent = mpi.wait_all(mpi.paramserver.send_tensors(served, updates, rule="add"))
        >>> mpi.paramserver.integrate_tensors(served, lambda fetched, p: p.copy_(fetched))
        >>> served.free()
    """
    comm = resolve(comm)
    served = ServedTensors(tensors, comm, optimizer)
    if comm.rank == 0:
        wait_all([pack.server.send(pack.fetched, "copy") for pack in served.packs])
    process.barrier(comm)
    return served


def prefetch_tensors(served: ServedTensors) -> list[Handle[Tensor]]:
    """Start to fetch the values of the servers. Any rank may call it, at any time.

    Args:
        served (ServedTensors): tensors and servers from ``init_tensors``.

    Returns:
        One handle per server. ``integrate_tensors`` waits for these handles.

    Raises:
        ParameterServerError: the servers were freed.
    """
    served.fetching = [pack.server.receive(pack.fetched) for pack in served.packs]
    return served.fetching


def integrate_tensors(served: ServedTensors, fn: Callable[[Tensor, Tensor], object]) -> None:
    """Call ``fn(fetched, tensor)`` for each tensor, with the values that ``prefetch_tensors`` has fetched.

    If no fetch is in progress, this function first fetches the values. Any rank may call it, at any time.

    Args:
        served (ServedTensors): tensors and servers from ``init_tensors``.
        fn (callable): function of the fetched values and the tensor, both of the same shape, which changes the tensor
            in place, such as ``lambda fetched, p: p.copy_(fetched)``. It runs under ``torch.no_grad()``.

    Raises:
        ParameterServerError: the servers were freed.
    """
    fetching, served.fetching = served.fetching or prefetch_tensors(served), []
    wait_all(fetching)
    with torch.no_grad():
        for pack in served.packs:
            for fetched, x in zip(pack.views(pack.fetched), pack.tensors, strict=True):
                fn(fetched, x)


def send_tensors(
    served: ServedTensors,
    updates: Sequence[Tensor],
    rule: str = "add",
    local: Callable[[Tensor], object] | None = None,
    **options: Any,
) -> list[Handle[Tensor]]:
    """Send one update for each tensor. Any rank may call it, at any time.

    The updates are copied, so they may be changed as soon as the function returns.

    Args:
        served (ServedTensors): tensors and servers from ``init_tensors``.
        updates (list of Tensor): one tensor per served tensor, in the same order, with the same shape and dtype.
        rule (str): rule that the servers apply, as for ``ParameterServer.send``. Default "add".
        local (callable): function that changes the copy of each update in place before it is sent. It can scale the
            update by the learning rate, for example. Default None, the copy is sent unchanged.
        **options: options of the rule, as for ``ParameterServer.send``.

    Returns:
        One handle per server. The rule has been applied when all handles are complete.

    Raises:
        TypeError: an update is not a tensor, or the rule does not accept the options. Nothing has been sent.
        ValueError: the number, a shape or a dtype of the updates differs from the served tensors, or the rule is
            unknown. Nothing has been sent.
        ParameterServerError: the servers were freed.
    """
    handles = []
    updates_by_pack = served.in_packs(updates)
    # Check all packs first, so that a mistake raises before anything is sent.
    for pack in served.packs:
        rules.checked(rule, options, pack.server.dtype, pack.server.optimizer)
        pack.wait_for_sent_buffer()
    for pack, pack_updates in zip(served.packs, updates_by_pack, strict=True):
        for part, update in zip(pack.views(pack.sent), pack_updates, strict=True):
            part.copy_(update.detach())
            if local is not None:
                local(part)
        pack.sending, pack.sent_by = pack.server.send(pack.sent, rule, **options), (rule, options)
        handles.append(pack.sending)
    return handles
