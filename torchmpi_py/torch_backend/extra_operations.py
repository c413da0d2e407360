"""Operations of process groups beyond the verbs, in the form of a flavour: recorded and explained as verbs are.

barrier     ends with an error when its group is destroyed
alltoall    parts of any sizes, as messages between all pairs
gather      large tensors, as messages straight into the list of root
scatter     large tensors, as messages straight from the list of root
sparse      allreduce of sparse tensors: each rank gathers all indices and values, and adds them in rank order
memory      symmetric memory for buckets
divided     a mean of whole numbers, which the verbs refuse: Lightning counts samples in such tensors
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives.flavour import Gathering
from torchmpi_py.collectives.flavours import mpi_steps
from torchmpi_py.collectives.plan import Carrier, Operation, Plan
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core import backoff
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import copy_to, flat
from torchmpi_py.errors import CommunicatorError, RanksDisagree, Unavailable
from torchmpi_py.memory import symmetric

_BY_MESSAGE_BYTES = 64 << 10  # of all ranks: from there on a flat tensor of all parts costs more than messages


class ExtraOperations(Carrier):
    """The extra operations of one process group."""

    name = "mpi"

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def operation(
        self, name: str, *arguments: Any, compared: tuple[Any, ...] = ("any size",), method: str = "",
        keep: Callable[[Any], object] | None = None,
    ) -> Operation[Any]:  # fmt: skip
        """An operation, carried out by ``method`` (default: its name). Tensors must be arguments, not in lists.

        ``keep`` gets what the method returns.
        """
        resolve(self.comm)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        device = next((x.device for x in tensors if x.is_cuda), None)
        plan = Plan(
            name=name, flavour=self, comm=self.comm, num_bytes=sum(x.nbytes for x in tensors if not x.is_sparse),
            device=device, fingerprint=(name, self.name, *compared), method=method,
        )  # fmt: skip
        return Operation(plan, arguments, None, keep)

    def alltoall_operation(self, outputs: list[Tensor], inputs: list[Tensor]) -> Operation[Any]:
        """``outputs[r]`` becomes rank r's ``inputs[this rank]``; the numbers of elements match in each pair."""
        compared = "any size", inputs[0].dtype
        return self.operation("alltoall", True, *outputs, *inputs, compared=compared, method="exchange")

    def takes(self, verb: str, x: Tensor) -> bool:
        """Whether a gather or scatter, of ``x`` on each rank, is one for messages: else the verb's flavour has it."""
        num_bytes = self.comm.size * x.nbytes
        if x.is_cuda or num_bytes < _BY_MESSAGE_BYTES:
            return False
        return selector.flavour_for(verb, self.comm, x.device, num_bytes, symmetric=False, name=None).name == self.name

    def with_root(self, verb: str, x: Tensor, parts: Sequence[Tensor], root: int) -> Operation[Any]:
        """The gather of ``x`` into the ``parts`` on root, or the scatter of these into ``x``. All have one size."""
        num_bytes = self.comm.size * x.nbytes
        of_root = [x[:0]] * self.comm.size
        of_root[root] = x  # what this rank sends to root in a gather, and receives from root in a scatter
        of_parts = parts or [x[:0]] * self.comm.size
        outputs, inputs = (of_parts, of_root) if verb == "gather" else (of_root, of_parts)
        compared = num_bytes, x.dtype, root
        operation = self.operation(verb, False, *outputs, *inputs, compared=compared, method="exchange")
        operation.plan.num_bytes = num_bytes
        return operation

    def mean_of_whole(self, operation: Operation[Any]) -> Operation[Any]:
        """The mean of whole numbers, in place of the ``operation`` for their sum."""
        plan = operation.plan
        operation.plan = dataclasses.replace(
            plan, flavour=self, method="divided", others=(plan.flavour, plan.method, *plan.others),
            fingerprint=(*(plan.fingerprint or ()), "mean"),
        )  # fmt: skip
        return operation

    def barrier(self, channel: Channel) -> None:
        """Wait for all ranks. CommunicatorError if the communicator is freed meanwhile."""
        request, nap = channel.mpi.Ibarrier(), backoff.Nap(0.001)
        while not request.Test():
            if self.comm.is_free:
                raise CommunicatorError("the barrier was given up, for its process group was destroyed")
            nap.take()

    def exchange(self, channel: Channel, has_empty: bool, *tensors: Tensor) -> None:
        """Messages between all pairs of ranks: the outputs, one for each rank, then the inputs.

        ``has_empty``: parts without elements are messages too, for the other rank may have, or expect, something else.
        """
        outputs, inputs = tensors[: channel.size], tensors[channel.size :]
        received = [_room_on_host(x) for x in outputs]
        sent = apart([flat(x).cpu() for x in inputs], received)
        # This rank's own part needs no message.
        received[channel.rank].copy_(sent[channel.rank].view_as(received[channel.rank]))
        # All receives first, so that messages arrive in place; each rank sends to its neighbours in another order.
        others = [(channel.rank + step) % channel.size for step in range(1, channel.size)]
        sources = [r for r in others if has_empty or received[r].numel()]
        destinations = [r for r in reversed(others) if has_empty or sent[r].numel()]
        receipts = [mpi_steps.post_recv(channel.mpi, received[r], r, mpi_steps.EXCHANGE) for r in sources]
        requests = [mpi_steps.post_send(channel.mpi, sent[r], r, mpi_steps.EXCHANGE) for r in destinations]
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

    def sparse(self, channel: Channel, x: Tensor) -> Tensor:
        """The coalesced sum of all sparse tensors ``x``."""
        choices = selector.choices("allgather", self.comm, x.device, symmetric=False, name=None)
        gathering = Gathering("selector", choices.flavour_for)
        kinds = channel.mpi.allgather(f"shape {tuple(x.shape)}, {x.sparse_dim()} of its dimensions sparse")
        if len(set(kinds)) > 1:
            differences = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise RanksDisagree(f"all_reduce of sparse tensors that differ: {differences}. Give each one shape")
        mine = x.detach().coalesce()
        indices = gathering.allgather(channel, flat(mine.indices().t()), None)
        values = gathering.allgather(channel, flat(mine.values()), None)
        return torch.sparse_coo_tensor(indices.t(), values, x.shape, device=x.device, check_invariants=False).coalesce()

    def divided(
        self, channel: Channel, source: Tensor, destination: Tensor, flavour: Carrier, method: str, op: str, *root: int
    ) -> None:
        """The sum that a method of ``flavour`` makes, divided by the ranks and rounded towards zero, as in NCCL.

        Sums are int64, or uint64, so that the sum of shorter numbers does not wrap around.
        """
        wide = torch.uint64 if source.dtype == torch.uint64 else torch.int64
        total = destination.to(wide)
        getattr(flavour, method)(channel, source.to(wide), total, op, *root)
        if root and root[0] != channel.rank:
            return
        if wide == torch.uint64:  # which torch does not divide
            total = total.cpu()
            numbers = total.numpy()
            numbers //= channel.size
        else:
            total.div_(channel.size, rounding_mode="trunc")
        copy_to(destination, total)

    def memory(self, channel: Channel, num_bytes: int, device: torch.device) -> Tensor | None:
        """Symmetric memory; None, on all ranks, where there is none to be had."""
        try:
            return symmetric.memory(channel, num_bytes, device)[:num_bytes]
        except Unavailable:
            return None


def _room_on_host(x: Tensor) -> Tensor:
    """Memory on the host to receive ``x`` in: its own, if MPI can write there."""
    return x.detach() if not x.is_cuda and x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device="cpu")


def apart(sent: list[Tensor], received: Sequence[Tensor]) -> list[Tensor]:
    """``sent``, flat tensors; of those that overlap a received one copies, which nothing overwrites."""
    ranges = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in received if x.numel())
    begins, ends = [begin for begin, _ in ranges], list(itertools.accumulate((end for _, end in ranges), max))

    def overlaps(x: Tensor) -> bool:
        num_before = bisect.bisect_left(begins, x.data_ptr() + x.nbytes)
        return x.numel() > 0 and num_before > 0 and ends[num_before - 1] > x.data_ptr()

    return [x.clone() if overlaps(x) else x for x in sent]
