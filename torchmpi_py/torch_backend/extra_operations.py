"""Operations that process groups need, and that the package's collectives do not provide.

The operations are methods of a class with the interface of a flavour, so they are recorded and reported like
collectives.

- `barrier`: A barrier that raises an error when its group is destroyed.
- `alltoall`: Parts of any sizes, sent as messages between all pairs of ranks.
- `gather`: Large tensors, sent as messages directly into root's list.
- `scatter`: Large tensors, sent as messages directly from root's list.
- `sparse`: An allreduce of sparse tensors. Each rank gathers all indices and values, and adds them in rank order.
- `memory`: Symmetric memory for buckets.
- `divided`: A mean of integers. The collectives refuse it, but Lightning counts samples in integer tensors.
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

_BY_MESSAGE_BYTES = 64 << 10  # Above this total size of all parts, messages take less time than one flat tensor.


class ExtraOperations(Carrier):
    """The extra operations of one process group."""

    name = "mpi"

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def operation(
        self, name: str, *arguments: Any, compared: tuple[Any, ...] = ("any size",), method: str = "",
        keep: Callable[[Any], object] | None = None,
    ) -> Operation[Any]:  # fmt: skip
        """Return an operation that ``method`` carries out (default: the method ``name``).

        Pass each tensor as a separate argument, not in a list. The values in ``compared`` must be equal on all ranks.
        ``keep`` is called with the method's result.
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
        """Return an alltoall, which writes the ``inputs[this rank]`` of rank r into this rank's ``outputs[r]``."""
        compared = "any size", inputs[0].dtype
        return self.operation("alltoall", True, *outputs, *inputs, compared=compared, method="exchange")

    def takes(self, verb: str, x: Tensor) -> bool:
        """Return whether to use messages, not a flavour's method, for a gather or scatter of one ``x`` per rank."""
        num_bytes = self.comm.size * x.nbytes
        if x.is_cuda or num_bytes < _BY_MESSAGE_BYTES:
            return False
        return selector.flavour_for(verb, self.comm, x.device, num_bytes, symmetric=False, name=None).name == self.name

    def with_root(self, verb: str, x: Tensor, parts: Sequence[Tensor], root: int) -> Operation[Any]:
        """Return the gather of ``x`` into root's ``parts``, or the scatter of ``parts`` into ``x``, all of one size."""
        num_bytes = self.comm.size * x.nbytes
        of_root = [x[:0]] * self.comm.size
        of_root[root] = x  # A gather sends x to root, and a scatter receives x from root.
        of_parts = parts or [x[:0]] * self.comm.size
        outputs, inputs = (of_parts, of_root) if verb == "gather" else (of_root, of_parts)
        compared = num_bytes, x.dtype, root
        operation = self.operation(verb, False, *outputs, *inputs, compared=compared, method="exchange")
        operation.plan.num_bytes = num_bytes
        return operation

    def mean_of_whole(self, operation: Operation[Any]) -> Operation[Any]:
        """Turn the ``operation`` for the sum of integers into the operation for their mean, and return it."""
        plan = operation.plan
        operation.plan = dataclasses.replace(
            plan, flavour=self, method="divided", others=(plan.flavour, plan.method, *plan.others),
            fingerprint=(*(plan.fingerprint or ()), "mean"),
        )  # fmt: skip
        return operation

    def barrier(self, channel: Channel) -> None:
        """Wait for all ranks. Raise CommunicatorError if the communicator is freed during the wait."""
        request, nap = channel.mpi.Ibarrier(), backoff.Nap(0.001)
        while not request.Test():
            if self.comm.is_free:
                raise CommunicatorError("barrier: the process group was destroyed too early; destroy it after the call")
            nap.take()

    def exchange(self, channel: Channel, has_empty: bool, *tensors: Tensor) -> None:
        """Exchange messages between all pairs of ranks.

        ``tensors`` contains an output for each rank, and then an input for each rank. With ``has_empty``, empty parts
        are sent too, because the other rank may expect or send a different size.
        """
        outputs, inputs = tensors[: channel.size], tensors[channel.size :]
        received = [_room_on_host(x) for x in outputs]
        sent = apart([flat(x).cpu() for x in inputs], received)
        # Copy this rank's own part, which needs no message.
        received[channel.rank].copy_(sent[channel.rank].view_as(received[channel.rank]))
        # Post all receives first, so that messages arrive in place. Each rank sends to a different rank first, so that
        # no rank is flooded with messages from all other ranks.
        others = [(channel.rank + step) % channel.size for step in range(1, channel.size)]
        sources = [r for r in others if has_empty or received[r].numel()]
        destinations = [r for r in reversed(others) if has_empty or sent[r].numel()]
        receipts = [mpi_steps.post_recv(channel.mpi, received[r], r, mpi_steps.EXCHANGE) for r in sources]
        requests = [mpi_steps.post_send(channel.mpi, sent[r], r, mpi_steps.EXCHANGE) for r in destinations]
        messages: list[Any] = [*itertools.chain(*receipts, *requests)]
        errors = []
        for message in messages:  # Wait for all messages, even after an error, because MPI still uses their memory.
            try:
                message.Wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        for output, buffer in zip(outputs, received, strict=True):
            if buffer.data_ptr() != output.data_ptr():
                output.copy_(buffer)

    def sparse(self, channel: Channel, x: Tensor) -> Tensor:
        """Return the coalesced sum of the sparse tensors ``x`` of all ranks."""
        choices = selector.choices("allgather", self.comm, x.device, symmetric=False, name=None)
        gathering = Gathering("selector", choices.flavour_for)
        kinds = channel.mpi.allgather(f"shape {tuple(x.shape)}, {x.sparse_dim()} of its dimensions sparse")
        if len(set(kinds)) > 1:
            differences = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise RanksDisagree(f"all_reduce: pass the same shape and sparse dims on all ranks; found {differences}")
        mine = x.detach().coalesce()
        indices = gathering.allgather(channel, flat(mine.indices().t()), None)
        values = gathering.allgather(channel, flat(mine.values()), None)
        return torch.sparse_coo_tensor(indices.t(), values, x.shape, device=x.device, check_invariants=False).coalesce()

    def divided(
        self, channel: Channel, source: Tensor, destination: Tensor, flavour: Carrier, method: str, op: str, *root: int
    ) -> None:
        """Compute a sum by a method of ``flavour``, and divide it by the number of ranks. Round toward zero like NCCL.

        Sums are int64 or uint64, so that the sum of shorter integers does not overflow.
        """
        wide = torch.uint64 if source.dtype == torch.uint64 else torch.int64
        total = destination.to(wide)
        getattr(flavour, method)(channel, source.to(wide), total, op, *root)
        if root and root[0] != channel.rank:
            return
        if wide == torch.uint64:  # torch cannot divide tensors of this dtype.
            total = total.cpu()
            numbers = total.numpy()
            numbers //= channel.size
        else:
            total.div_(channel.size, rounding_mode="trunc")
        copy_to(destination, total)

    def memory(self, channel: Channel, num_bytes: int, device: torch.device) -> Tensor | None:
        """Return ``num_bytes`` of symmetric memory, or None on all ranks if symmetric memory is unavailable."""
        try:
            return symmetric.memory(channel, num_bytes, device)[:num_bytes]
        except Unavailable:
            return None


def _room_on_host(x: Tensor) -> Tensor:
    """Return host memory for receiving ``x``: the memory of ``x`` if MPI can write to it, else new memory."""
    return x.detach() if not x.is_cuda and x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device="cpu")


def apart(sent: list[Tensor], received: Sequence[Tensor]) -> list[Tensor]:
    """Return the flat tensors ``sent``, with a copy in place of each tensor that overlaps a received tensor."""
    ranges = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in received if x.numel())
    begins, ends = [begin for begin, _ in ranges], list(itertools.accumulate((end for _, end in ranges), max))

    def overlaps(x: Tensor) -> bool:
        num_before = bisect.bisect_left(begins, x.data_ptr() + x.nbytes)
        return x.numel() > 0 and num_before > 0 and ends[num_before - 1] > x.data_ptr()

    return [x.clone() if overlaps(x) else x for x in sent]
