"""Operations of process groups beyond the verbs, in the form of a flavour: recorded and explained as verbs are.

barrier     ends with an error when its group is destroyed
alltoall    parts of any sizes, as messages between all pairs
sparse      allreduce of sparse tensors: each rank gathers all indices and values, and adds them in rank order
memory      symmetric memory for buckets
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives.flavour import Gathering
from torchmpi_py.collectives.flavours import mpi_steps
from torchmpi_py.collectives.operation import Operation
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core import backoff
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import flat
from torchmpi_py.errors import CommunicatorError, Unavailable
from torchmpi_py.memory import symmetric


class ExtraOperations:
    """The extra operations of one process group."""

    name = "mpi"
    exchanges_headers = False

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def operation(self, method: str, *arguments: Any) -> Operation[Any]:
        """The operation ``method``. A tensor is an argument of its own, not an item of a list."""
        resolve(self.comm)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        device = next((x.device for x in tensors if x.is_cuda), None)
        num_bytes = sum(x.nbytes for x in tensors if not x.is_sparse)
        flavour: Any = self
        fingerprint = (method, self.name, "any size")
        return Operation(
            method, method, flavour, self.comm, arguments, None, num_bytes, device=device, fingerprint=fingerprint
        )

    def alltoall_operation(self, outputs: list[Tensor], inputs: list[Tensor]) -> Operation[Any]:
        """``outputs[r]`` becomes rank r's ``inputs[this rank]``; the numbers of elements match in each pair."""
        return self.operation("alltoall", *outputs, *inputs)

    def barrier(self, channel: Channel) -> None:
        """Wait for all ranks. CommunicatorError if the communicator is freed meanwhile."""
        request, nap = channel.mpi.Ibarrier(), backoff.Nap(0.001)
        while not request.Test():
            if self.comm.is_free:
                raise CommunicatorError("the barrier was given up, for its process group was destroyed")
            nap.take()

    def alltoall(self, channel: Channel, *tensors: Tensor) -> None:
        """The outputs, one for each rank, then the inputs; see ``alltoall_operation``."""
        outputs, inputs = tensors[: channel.size], tensors[channel.size :]
        sent, received = [flat(x).cpu() for x in inputs], [_room_on_host(x) for x in outputs]
        if _may_overlap(sent, received):  # what comes must not overwrite what is still to be sent
            sent = [x.clone() for x in sent]
        # This rank's own part needs no message.
        received[channel.rank].copy_(sent[channel.rank].view_as(received[channel.rank]))
        # All receives first, so that messages arrive in place; each rank sends to its neighbours in another order.
        others = [(channel.rank + step) % channel.size for step in range(1, channel.size)]
        receipts = [mpi_steps.post_recv(channel.mpi, received[r], r, mpi_steps.EXCHANGE) for r in others]
        requests = [mpi_steps.post_send(channel.mpi, sent[r], r, mpi_steps.EXCHANGE) for r in reversed(others)]
        messages: list[Any] = [*itertools.chain(*receipts, *requests)]
        errors = []
        for message in messages:  # wait for all, also after an error: MPI uses their memory
            try:
                message.Wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        for output, got in zip(outputs, received, strict=True):
            if got.data_ptr() != output.data_ptr():
                output.copy_(got)

    def sparse(self, channel: Channel, x: Tensor, keep: Callable[[Tensor], object]) -> None:
        """Call ``keep`` with the coalesced sum of all sparse tensors ``x``."""
        plan = selector.plan("allgather", self.comm, x.device, symmetric=False, name=None)
        gathering = Gathering("selector", plan.flavour_for)
        mine = x.detach().coalesce()
        indices = gathering.allgather(channel, flat(mine.indices().t()), None)
        values = gathering.allgather(channel, flat(mine.values()), None)
        keep(torch.sparse_coo_tensor(indices.t(), values, x.shape, check_invariants=False).coalesce())

    def memory(
        self, channel: Channel, num_bytes: int, device: torch.device, keep: Callable[[Tensor | None], object]
    ) -> None:
        """Call ``keep`` with symmetric memory; with None, on all ranks, where there is none to be had."""
        try:
            keep(symmetric.memory(channel, num_bytes, device)[:num_bytes])
        except Unavailable:
            keep(None)


def _room_on_host(x: Tensor) -> Tensor:
    """Memory on the host to receive ``x`` in: its own, if MPI can write there."""
    return x.detach() if not x.is_cuda and x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _may_overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether the memory that flat tensors span overlaps what the others span."""
    ends = [[(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors if x.numel()] for tensors in (some, others)]
    if not all(ends):
        return False
    (begin, end), (start, stop) = ((min(low for low, _ in each), max(high for _, high in each)) for each in ends)
    return begin < stop and start < end
