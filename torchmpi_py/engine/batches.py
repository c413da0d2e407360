"""The base of iterators that know of ranks: their place in an epoch, a weight for each batch, the device of batches."""

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
    """Where an iteration is: its epoch, the samples that all ranks have used, and the facts about its last batch."""

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self.weight, self.num_samples = 1.0, 0
        self.is_running = self.is_over = False
        self.progress: Any = None  # of a stream


class BatchIterator(ABC):
    """The attributes of an iterator that the engine reads, and the methods that set it to a place in an epoch.

    With each batch ``weight`` and ``num_samples`` are set (``iterators`` explains them), and ``position``: how many
    samples of the epoch all ranks have used with this batch. A batch is None where this rank has no samples in a step
    that other ranks take; then ``num_samples`` and ``weight`` are 0. An iteration may begin within another one, for
    example in a hook that tests on the training data: when it ends, the attributes are again those of the outer one.
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
        self.follows_place = place[0] is None  # rank and size are those of the current communicator, and were not given
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.seed = at_least(0, "seed", seed)
        self.prefetch = at_least(0, "prefetch", prefetch)
        # With its index: "cuda" alone means another device in the prefetching thread than in the caller's.
        self.device = None if device is None else torch.empty(0, device=device).device
        self.drop_last = drop_last
        self.epoch = 0  # of the next iteration
        self._first = 0  # the position in the epoch where the next iteration begins
        self._is_set = True  # epoch and position were chosen since the last iteration began
        self._place = IterationPlace(0, 0)  # of the last iteration

    @property
    def position(self) -> int:
        """The samples of the epoch that all ranks have used with the last batch."""
        return self._place.position

    @property
    def weight(self) -> float:
        """The weight of the last batch in an average over the ranks."""
        return self._place.weight

    @property
    def num_samples(self) -> int:
        """The samples in this rank's last batch."""
        return self._place.num_samples

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or of the rest of one."""

    def may_give_none(self) -> bool:
        """Whether a rank may have no samples in a step. The same on every rank."""
        return not self.drop_last

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """The facts that are equal on all ranks, by their names in an error."""

    @abstractmethod
    def _order_facts(self) -> dict[str, Any]:
        """The facts that determine the order of samples, as plain data."""

    def check_alike(self) -> None:
        """ValueError, on all ranks, if the ranks iterate over different things. Collective.

        ValueError as well if rank and size are defaults, and those of the current communicator have changed. Nothing
        is compared if rank and size were given.
        """
        rank, size = _rank_and_size() if self.follows_place else (self.rank, self.size)
        name = type(self).__name__
        if (rank, size) != (self.rank, self.size):
            raise ValueError(
                f"the {name} was made for rank {self.rank} of {self.size}, but this is rank {rank} of {size}: "
                "make it after mpi.start(), at the level at which it is used"
            )
        if self.size > 1 and self.follows_place:
            check_equal(f"{name}s", verbs.allgather_object(self._facts()))

    def take_place(self) -> None:
        """Take this rank's present rank and size, because ranks have died. If they were given, they remain."""
        if self.follows_place:
            self.rank, self.size = _rank_and_size()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration run through ``epoch``; the same on every rank."""
        self.epoch, self._is_set = at_least(0, "epoch", epoch), True

    def set_position(self, position: int) -> None:
        """Let the next iteration begin after so many samples of its epoch, over all ranks; the same on every rank."""
        self._first, self._is_set = at_least(0, "position", position), True

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch, as plain data that are equal on all ranks, whatever is read ahead."""
        is_next = self._is_set or self._place.is_over
        place = IterationPlace(self.epoch, self._first) if is_next else self._place
        return {"epoch": place.epoch, "position": place.position, "order": self._order_facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on at the place of a ``state_dict``; the same on every rank.

        The number of ranks may be another one: the rest of the epoch is divided among the present ranks. ValueError if
        the place is in the middle of an epoch of another order.
        """
        order = self._order_facts()
        if state["position"] > 0 and state["order"] != order:
            raise ValueError(
                f"the place is in the middle of an epoch over {state['order']}; this is another order: {order}"
            )
        self.set_epoch(state["epoch"])
        self.set_position(state["position"])

    def _seed_of_workers(self, place: IterationPlace) -> int:
        """A seed for this rank's workers, which follows from seed, epoch and place."""
        return zlib.crc32(repr((self.seed, place.epoch, place.position, self.rank)).encode())

    def _begin(self) -> IterationPlace:
        """The place where an iteration begins; the next iteration is of the next epoch."""
        place = IterationPlace(self.epoch, self._first)
        self.epoch, self._first = self.epoch + 1, 0
        return place

    def _run(self, place: IterationPlace, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The batches of an iteration. Its place is this iterator's, except while another one runs within it."""
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
    """ValueError if the ranks' facts, in rank order, differ. All ranks bring the same list."""
    for name in facts[0]:
        values = [each.get(name) for each in facts]
        if any(value != values[0] for value in values):
            raise ValueError(f"the ranks' {what} differ: {name} is {values}; give all ranks the same one")


def moved(batch: Any, device: torch.device | None) -> Any:
    """The batch on the device. For CUDA on a stream of its own, so that the copy overlaps the step being computed."""
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
    """The batch, after CUDA's allocator is informed that the computing stream uses it."""
    if device is not None and device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(stream), batch)
    return batch


def _rank_and_size(rank: int | None = None, size: int | None = None) -> tuple[int, int]:
    """(rank, size) as given, else of the current communicator, else 0 of 1."""
    if rank is None and size is None:
        return (process.rank(), process.size()) if process.is_started() else (0, 1)
    if rank is None or size is None or not 0 <= rank < size:
        raise ValueError(f"rank={rank}, size={size}: give neither, or both with 0 <= rank < size")
    return rank, size
