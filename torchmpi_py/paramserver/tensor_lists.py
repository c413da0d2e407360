"""Parameter servers for lists of tensors, such as the parameters of a module.

Tensors of one dtype and device are packed into one flat server, so that a model of 200 small tensors costs one
exchange per shard, and not 200. Fetched values arrive in flat buffers first; ``integrate_tensors`` passes them on to
the tensors. After TorchMPI's functions of these names (reference 5.7), which kept tables by tensor; here
``init_tensors`` returns the object that the other functions take.
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
    """The tensors of one dtype and device, their server, and flat buffers there with a view for each tensor."""

    def __init__(self, tensors: Sequence[Tensor], comm: Communicator, optimizer: str | None) -> None:
        self.tensors = list(tensors)
        self.fetched = torch.cat([x.detach().reshape(-1) for x in tensors])
        self.sent = torch.empty_like(self.fetched)
        self.server: ParameterServer = init(self.fetched, comm=comm, optimizer=optimizer)
        self.sending: Handle[Tensor] | None = None
        self.sent_by: tuple[str, dict[str, Any]] = "", {}  # the rule and options of the last send
        self.failed: tuple[Handle[Tensor], str, dict[str, Any]] | None = None  # the first send with an unseen error

    def wait_for_sent_buffer(self) -> None:
        """Wait until ``sent`` may be filled again. An error of the send is raised by its handle, or ``check_sends``."""
        if (sending := self.sending) is None:
            return
        was_seen = sending._error_was_seen
        try:
            sending.wait()
        except BaseException as error:
            if error is not sending._error:  # such as a deadline: the send goes on
                raise
            sending._error_was_seen = was_seen
            if not was_seen and self.failed is None:
                self.failed = sending, *self.sent_by

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer in the shapes of the tensors."""
        parts = torch.split(flat, [x.numel() for x in self.tensors])
        return [part.view(x.shape) for part, x in zip(parts, self.tensors, strict=True)]


class ServedTensors:
    """Tensors and their servers; made by ``init_tensors``."""

    def __init__(self, tensors: Iterable[Tensor], comm: Communicator, optimizer: str | None) -> None:
        self.tensors = _same_on_all_ranks(tensors, comm)
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, x in enumerate(self.tensors):
            by_kind.setdefault((x.dtype, x.device), []).append(index)
        self._indices = list(by_kind.values())
        self.packs = [_Pack([self.tensors[index] for index in indices], comm, optimizer) for indices in self._indices]
        self.fetching: list[Handle[Tensor]] = []
        self.names = [f"tensor {index}" for index in range(len(self.tensors))]  # for errors

    def in_packs(self, updates: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors that correspond to the served ones, pack by pack."""
        if len(updates) != len(self.tensors):
            raise ValueError(f"send_tensors: {len(updates)} updates for {len(self.tensors)} tensors")
        check_parts("send_tensors", "updates", updates)
        for index, (update, x) in enumerate(zip(updates, self.tensors, strict=True)):
            if update.shape != x.shape or update.dtype != x.dtype:
                raise ValueError(
                    f"send_tensors: update {index} has shape {tuple(update.shape)} and {update.dtype}, but the tensor "
                    f"has {tuple(x.shape)} and {x.dtype}"
                )
        return [[updates[index] for index in indices] for indices in self._indices]

    def _finish_sends(self) -> None:
        """Wait until the servers have what this rank has sent; raises what the last sends have raised."""
        for pack in self.packs:
            pack.wait_for_sent_buffer()
        self.check_sends()

    def check_sends(self) -> None:
        """ParameterServerError, once, if sends have failed and nobody has waited for their handles.

        Does not block unless one has.
        """
        for pack in self.packs:
            if pack.sending is not None and pack.sending.done():
                pack.wait_for_sent_buffer()
        if not any(pack.failed for pack in self.packs):
            return
        failed, names = [], []
        for pack, indices in zip(self.packs, self._indices, strict=True):
            pack.wait_for_sent_buffer()  # the same send may fail in the other packs as well
            if pack.failed is not None and not pack.failed[0]._error_was_seen:
                pack.failed[0].give_up()  # its error is raised here
                failed.append(pack.failed)
                names += [self.names[index] for index in indices]
            pack.failed = None
        if failed:
            handle, rule, options = failed[0]
            error, more = handle._error, f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ParameterServerError(
                f"a send of {', '.join(names[:3])}{more} to the parameter server by rule {rule!r}, options {options}, "
                f"has failed: {type(error).__name__}: {error}; what was sent is lost, but for shards where the rule "
                "did not fail; correct the rule or its options"
            ) from error

    @property
    def num_bytes_sent(self) -> int:
        """The number of bytes that this rank has sent to shards."""
        return sum(pack.server.num_bytes_sent for pack in self.packs)

    @property
    def num_bytes_received(self) -> int:
        """The number of bytes that this rank has fetched from shards."""
        return sum(pack.server.num_bytes_received for pack in self.packs)

    def state_dict(self) -> dict[str, Any]:
        """The state of each server (``ParameterServer.state_dict``), and the shapes of the tensors."""
        return {"shapes": self._shapes(), "servers": [pack.server.state_dict() for pack in self.packs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that was saved from a list of tensors of the same shapes and dtypes, in the same order.

        One rank calls it, and the others go on after it. A fetch of this rank that is under way is dropped.
        """
        if state["shapes"] != self._shapes():
            raise ValueError(
                f"load_state_dict: saved from tensors of shapes {state['shapes']}, these are {self._shapes()}"
            )
        pairs = list(zip(self.packs, state["servers"], strict=True))
        for pack, saved in pairs:
            pack.server.check_state(saved)  # all before the first is changed
        wait_all(self.fetching)
        self.fetching = []  # the values of before
        for pack, saved in pairs:
            pack.server.load_state_dict(saved)

    def _shapes(self) -> list[list[int]]:
        return [list(x.shape) for x in self.tensors]

    def free(self) -> None:
        """Free the servers. Collective."""
        for pack in self.packs:
            pack.server.free()


def _same_on_all_ranks(tensors: Iterable[Tensor], comm: Communicator) -> list[Tensor]:
    """The tensors; RanksDisagree unless all ranks give the same shapes and dtypes in the same order.

    TypeError if a rank gives anything but dense tensors. Both are raised on every rank.
    """
    dense = list[Tensor]()

    def described() -> list[str]:
        dense[:] = [check_tensor("init_tensors", f"number {index}", x) for index, x in enumerate(tensors)]
        return [f"{list(x.shape)} {x.dtype} on {x.device.type}" for x in dense]

    allgather, how = comm.direct.mpi.allgather, ((TypeError,), agree.kind_and_text, agree.same_error)
    given = journal.run_together(
        "paramserver.init_tensors", comm, lambda: agree.gather_results(allgather, described, *how)
    )
    if (rank := agree.first_different(given)) is not None:
        index, there, here = agree.first_difference(given[rank], given[0], "none")
        raise RanksDisagree(
            f"init_tensors: tensor {index} is {here} on rank 0, and {there} on rank {rank}; give tensors of the same "
            "shapes and dtypes, in the same order, on all ranks"
        )
    return dense


def init_tensors(
    tensors: Iterable[Tensor], *, comm: Communicator | None = None, optimizer: str | None = None
) -> ServedTensors:
    """Servers for tensors, which hold rank 0's values when this function returns. Collective over ``comm``.

    Every rank gives tensors of the same shapes and dtypes, which do not change. ``optimizer`` as for ``init``.
    """
    comm = resolve(comm)
    served = ServedTensors(tensors, comm, optimizer)
    if comm.rank == 0:
        wait_all([pack.server.send(pack.fetched, "copy") for pack in served.packs])
    process.barrier(comm)
    return served


def prefetch_tensors(served: ServedTensors) -> list[Handle[Tensor]]:
    """Start to fetch the servers' values; ``integrate_tensors`` waits for them."""
    served.fetching = [pack.server.receive(pack.fetched) for pack in served.packs]
    return served.fetching


def integrate_tensors(served: ServedTensors, fn: Callable[[Tensor, Tensor], object]) -> None:
    """Call ``fn(fetched, tensor)`` for each tensor, with the values fetched last; fetches them if none were."""
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
    """Send one update for each tensor; the updates may be changed when this function returns.

    ``local(update)`` changes the copy that is sent, in place, and not the caller's tensor: a scaling by the learning
    rate, say.
    """
    handles = []
    given_by_pack = served.in_packs(updates)
    # A mistake shows before the first pack is sent.
    for pack in served.packs:
        rules.checked(rule, options, pack.server.dtype, pack.server.optimizer)
        pack.wait_for_sent_buffer()
    for pack, given in zip(served.packs, given_by_pack, strict=True):
        for part, update in zip(pack.views(pack.sent), given, strict=True):
            part.copy_(update.detach())
            if local is not None:
                local(part)
        pack.sending, pack.sent_by = pack.server.send(pack.sent, rule, **options), (rule, options)
        handles.append(pack.sending)
    return handles
