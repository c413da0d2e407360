"""The allreduce of flavour ``shared`` on tensors of one dtype and size, with state that is reused by later calls.

There are three methods:

- *in place*: for symmetric tensors at the same offset on all ranks, in two shots (``two_shot.py``). The steps are kept
  for later calls with the same tensor. Buckets of a training loop use this method.
- *at once*: for small ordinary tensors. Their values travel with the headers (``staging.allreduce_at_once``).
- *by headers*: for all other tensors, and if the ranks have chosen different methods. The headers determine how the
  data moves.

A rank chooses its method from its own tensors alone. Each method has a different header, so the ranks detect that they
have chosen different methods before any rank changes a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchmpi_py.collectives.flavours import ordinary, staging, two_shot
from torchmpi_py.collectives.flavours.node_group import Headers, NodeGroup
from torchmpi_py.collectives.reductions import kernel
from torchmpi_py.core import config
from torchmpi_py.memory import symmetric

_MOST_KEPT = 1024  # maximum number of in-place states of one size, and of prepared operations of a node group


class _InPlace(NamedTuple):
    """The state of an in-place allreduce for later calls with the same symmetric tensor.

    The state is valid until the tensor's segment is freed.
    """

    segment: symmetric.AnySegment
    header: bytes
    steps: list[two_shot.Step]


class PreparedAllreduce:
    """The allreduce with ``op`` of tensors with the dtype and size of ``x``."""

    def __init__(self, node: NodeGroup, x: Tensor, op: str) -> None:
        self._node, self._how, self._what = node, kernel(x.dtype, op), f"allreduce with {op}"
        self._in_place: dict[int, _InPlace] = {}  # by the tensor's address
        is_at_once = x.nbytes <= 2 * node.chunk_bytes and staging.takes_one_shot(node, self._how)
        self._turns = [node.staged(self._what, x, turn) for turn in (0, 1)] if is_at_once else []

    def run(self, source: Tensor, destination: Tensor) -> None:
        """Write the reduction of all ``source`` into ``destination``; the two are the same tensor or do not overlap."""
        x = source if source.dim() == 1 else source.view(-1)  # A view would take 1 us.
        out, address, node = x, x.data_ptr(), self._node
        if source is destination or address == destination.data_ptr():
            ready = self._in_place.get(address)
            if ready is None or not ready.segment.is_live:
                location = symmetric.find(x)
                ready = None if location is None else self._prepare(x, *location)
            if ready is not None:
                self._run_in_place(x, ready)
                return
            is_ordinary = location is None
        else:
            out = destination.view(-1)
            is_ordinary = symmetric.find(x) is None and symmetric.find(out) is None
        if not is_ordinary or not self._turns:
            self._run_by_headers(x, out, node.exchange_headers(self._what, x, out))
        elif not staging.allreduce_at_once(node, x, out, self._how, self._turns[node.turn]):
            self._run_by_headers(x, out, node.read_headers(self._what, x))

    def run_adopting(self, x: Tensor) -> None:
        """Reduce ``x`` in place, after an attempt to make its memory symmetric.

        If ``x`` is an ordinary tensor on all ranks, the ranks move its memory into files that all ranks map
        (``symmetric.adopt``). After a failure the ranks do not try again.
        """
        node = self._node
        if node.can_adopt and symmetric.find(x) is None:
            node.announce(node.adoptable_header(self._what, x))
            headers = node.read_headers(self._what, x)
            if not headers.are_adoptable:
                self._run_by_headers(x, x, headers)
                return
            # ``adopt`` also waits until all ranks have read the headers.
            node.can_adopt = symmetric.adopt(node.channel, x)
            for prepared in node.prepared.values():
                prepared.drop_dead()
        self.run(x, x)

    def drop_dead(self) -> None:
        """Discard the state of tensors whose segments have been freed."""
        self._in_place = {at: ready for at, ready in self._in_place.items() if ready.segment.is_live}

    def _prepare(self, x: Tensor, segment: symmetric.AnySegment, offset: int) -> _InPlace | None:
        """Create the state for tensors at this offset of a segment on all ranks.

        Return None if a rank of the channel has no part in the segment.
        """
        if not self._node.is_within(segment):
            return None
        with torch.inference_mode(False):  # Later calls outside of this mode use the steps too.
            views = self._node.views(x, [offset] * self._node.size)
        steps = two_shot.allreduce(views, views, self._node.rank, config.current.cache_bytes)
        self.drop_dead()
        if len(self._in_place) >= _MOST_KEPT:
            self._in_place.clear()
        ready = self._in_place[x.data_ptr()] = _InPlace(segment, self._node.header(self._what, x), steps)
        return ready

    def _run_in_place(self, x: Tensor, ready: _InPlace) -> None:
        """Reduce ``x`` in place with the prepared steps if all ranks have chosen this method; else by headers."""
        node = self._node
        if node.announce(ready.header):  # Equal headers mean that all tensors are at the prepared offset.
            two_shot.carry_out(ready.steps, self._how)
            node.barrier()
        else:
            self._run_by_headers(x, x, node.read_headers(self._what, x))

    def _run_by_headers(self, x: Tensor, out: Tensor, headers: Headers) -> None:
        """Carry out the allreduce by the method that fits the places of all ranks' tensors.

        The result may replace the input on some ranks (``x`` is ``out``), and not on others.
        """
        node, how = self._node, self._how
        if headers.written is None:
            ordinary.allreduce(node, x, out, how, headers)
            return
        # The results are symmetric, so the ranks work in place. If the inputs are not symmetric, each rank first copies
        # the part of its input that its peers need into its result.
        destinations = node.views(out, headers.written)
        if headers.read is not None:
            sources = node.views(x, headers.read)
        else:
            two_shot.publish(x, out, node.rank, node.size)
            sources = [x if rank == node.rank else view for rank, view in enumerate(destinations)]
            node.barrier()
        two_shot.carry_out(two_shot.allreduce(sources, destinations, node.rank, config.current.cache_bytes), how)
        node.barrier()


def of(node: NodeGroup, x: Tensor, op: str) -> PreparedAllreduce:
    """Return the node group's allreduce for ``op`` and the dtype and size of ``x``. The first call creates it."""
    key = (op, x.dtype, x.numel())
    prepared: PreparedAllreduce | None = node.prepared.get(key)
    if prepared is None:
        if len(node.prepared) >= _MOST_KEPT:
            node.prepared.clear()
        prepared = node.prepared[key] = PreparedAllreduce(node, x, op)
    return prepared
