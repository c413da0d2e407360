"""The base class of iterators over a rank's batches: position in an epoch, weight of a batch, device of batches."""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from torchmpi_py.collectives import verbs
from torchmpi_py.engine.sources import at_least
from torchmpi_py.memory import devices
from torchmpi_py.runtime import process

logger = logging.getLogger("torchmpi_py")

Device = torch.device | str | None
_Place = tuple[int | None, int | None]  # rank and size


class IterationPlace:
    """The epoch and position of an iteration, and the weight and number of samples of its last batch."""

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self.weight, self.num_samples = 1.0, 0
        self.is_running = self.is_over = False
        self.progress: Any = None  # a _StreamProgress if the data is a stream


class BatchIterator(ABC):
    """Base class of iterators that the engine can set to a position in an epoch.

    With each batch the iterator sets ``weight`` and ``num_samples`` (see ``iterators``) and ``position``. The position
    is the number of samples of the epoch that the ranks together have used, including this batch. If this rank has no
    samples in a step but other ranks have some, the batch is None, and ``num_samples`` and ``weight`` are 0.

    An iteration may begin within another one, for example in a hook that tests on the training data. When the inner
    iteration ends, the attributes describe the outer iteration again.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int,
        prefetch: int,
        device: Device,
        drop_last: bool,
        place: _Place = (None, None),
    ) -> None:
        self.rank, self.size = _rank_and_size(*place)
        self.follows_place = place[0] is None  # whether rank and size come from the current communicator
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.seed = at_least(0, "seed", seed)
        self.prefetch = at_least(0, "prefetch", prefetch)
        # The device needs its index, because "cuda" may mean another device in the prefetching thread.
        self.device = None if device is None else torch.empty(0, device=device).device
        self.drop_last = drop_last
        self.epoch = 0  # epoch of the next iteration
        self._first = 0  # position in the epoch where the next iteration begins
        self._is_set = True  # whether epoch and position were chosen since the last iteration began
        self._place = IterationPlace(0, 0)  # place of the last iteration

    @property
    def position(self) -> int:
        """The number of samples of the epoch that the ranks together have used, including the last batch."""
        return self._place.position

    @property
    def weight(self) -> float:
        """The weight of the last batch in an average over the ranks."""
        return self._place.weight

    @property
    def num_samples(self) -> int:
        """The number of samples in this rank's last batch."""
        return self._place.num_samples

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the next epoch, or of the rest of the epoch after ``set_position``."""

    def may_give_none(self) -> bool:
        """Return whether a rank may have no samples in a step. The result is the same on every rank."""
        return not self.drop_last

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return the values that must be equal on all ranks, keyed by the names that an error message uses."""

    @abstractmethod
    def _order_facts(self) -> dict[str, Any]:
        """Return the values that determine the order of samples, as plain data."""

    def check_alike(self) -> None:
        """Check that all ranks iterate over the same data. Every rank must make this call.

        If ``rank`` and ``size`` were passed to the constructor, the ranks compare nothing.

        Raises:
            ValueError: the iterators differ between ranks (raised on every rank), or rank or size of the current
                communicator has changed since the iterator was created.
        """
        rank, size = _rank_and_size() if self.follows_place else (self.rank, self.size)
        name = type(self).__name__
        if (rank, size) != (self.rank, self.size):
            raise ValueError(
                f"the {name} was created for rank {self.rank} of {self.size}, but this is rank {rank} of {size}: "
                "create it after mpi.start(), at the level at which it is used"
            )
        if self.size > 1 and self.follows_place:
            check_equal(f"{name}s", verbs.allgather_object(self._facts()))

    def take_place(self) -> None:
        """Update rank and size after ranks have died, unless they were passed to the constructor."""
        if self.follows_place:
            self.rank, self.size = _rank_and_size()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Make the same call on every rank.

        Args:
            epoch (int): number of the epoch, at least 0.
        """
        self.epoch, self._is_set = at_least(0, "epoch", epoch), True

    def set_position(self, position: int) -> None:
        """Choose where the next iteration begins in its epoch. Make the same call on every rank.

        Args:
            position (int): number of samples, over all ranks, to skip; at least 0.
        """
        self._first, self._is_set = at_least(0, "position", position), True

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position and the order as plain data, equal on all ranks.

        The position is the position after the last batch that the loop has received, so prefetched batches do not
        count.
        """
        is_next = self._is_set or self._place.is_over
        place = IterationPlace(self.epoch, self._first) if is_next else self._place
        return {"epoch": place.epoch, "position": place.position, "order": self._order_facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a saved position. Make the same call on every rank.

        The number of ranks may have changed since the save: the rest of the epoch is divided among the current ranks.

        Args:
            state (mapping): result of ``state_dict``.

        Raises:
            ValueError: the position is in the middle of an epoch that has a different order.
        """
        order = self._order_facts()
        if state["position"] > 0 and state["order"] != order:
            raise ValueError(
                f"the saved order is {state['order']}, but this iterator has {order}; use the same data and options"
            )
        self.set_epoch(state["epoch"])
        self.set_position(state["position"])

    def _seed_of_workers(self, place: IterationPlace) -> int:
        """Return a seed for this rank's workers, computed from seed, epoch, position and rank."""
        return zlib.crc32(repr((self.seed, place.epoch, place.position, self.rank)).encode())

    def _begin(self) -> IterationPlace:
        """Return the place where an iteration begins, and advance the iterator to the next epoch."""
        place = IterationPlace(self.epoch, self._first)
        self.epoch, self._first = self.epoch + 1, 0
        return place

    def _run(self, place: IterationPlace, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield the batches of an iteration. ``place`` stores the position of the iteration.

        While an inner iteration runs, the attributes of the iterator describe the inner iteration.
        """
        outer = self._place if self._place.is_running else None
        self._place, self._is_set, place.is_running = place, False, True
        try:
            with closing(batches):
                for batch in batches:
                    self._place = place
                    yield batch
            place.is_over = True
        finally:
            place.is_running = False
            self._place = outer or place


def check_equal(what: str, facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the ranks have different values. ``facts`` contains each rank's values, in rank order.

    ``what`` is a plural noun for the message, such as "samplers".
    """
    for name in facts[0]:
        values = [each.get(name) for each in facts]
        if any(value != values[0] for value in values):
            raise ValueError(f"the ranks' {what} differ: {name} is {values} in rank order; make it equal on all ranks")


def moved(batch: Any, device: torch.device | None) -> Any:
    """Return the batch on the device. With CUDA, copy on a separate stream, so that the copy overlaps the step."""
    if device is None or device.type != "cuda":
        return batch if device is None else tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if tensor.is_cuda else tensor.pin_memory()).to(device, non_blocking=True)

    with devices.of(device).on(stream):
        batch = tree_map_only(torch.Tensor, copied, batch)
    stream.synchronize()
    return batch


def adopted(batch: Any, device: torch.device | None) -> Any:
    """Record for CUDA's allocator that the current stream uses the batch, and return the batch."""
    if device is not None and device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(stream), batch)
    return batch


def _rank_and_size(rank: int | None = None, size: int | None = None) -> tuple[int, int]:
    """Return the arguments, or else rank and size of the current communicator, or (0, 1) before ``mpi.start()``."""
    if rank is None and size is None:
        return (process.rank(), process.size()) if process.is_started() else (0, 1)
    if rank is None or size is None or not 0 <= rank < size:
        raise ValueError(f"rank={rank}, size={size}: pass neither rank nor size, or both with 0 <= rank < size")
    return rank, size
