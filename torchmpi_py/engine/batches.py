"""The base of iterators that know of ranks: their place, a weight for each batch, the device of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from torchmpi_py.collectives import verbs
from torchmpi_py.engine.sources import at_least
from torchmpi_py.memory import devices
from torchmpi_py.runtime import process


class BatchIterator(ABC):
    """The attributes of an iterator that the engine reads, and the methods that set it to a place in an epoch.

    With each batch the attributes ``weight`` and ``num_samples`` are set (``iterators`` explains them), and
    ``position``: how many samples of the epoch all ranks have used with this batch. One iteration may begin within
    another, as where a hook tests on the training data: with the next batch of the other, or if the engine trains on
    that one as soon as the first is over, these attributes, and the place in ``state_dict``, are those of the other.
    """

    _OF_ITERATION: tuple[str, ...] = ("position", "weight", "num_samples", "_epoch_under_way", "_is_set")
    """The attributes that belong to one iteration."""

    def __init__(
        self,
        batch_size: int,
        seed: int,
        prefetch: int,
        device: torch.device | str | None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        self.rank, self.size = _place(rank, size)
        self.follows_place = rank is None  # rank and size are those of the current communicator, and were not given
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.seed = at_least(0, "seed", seed)
        self.prefetch = at_least(0, "prefetch", prefetch)
        self.device = _indexed(device)
        self.epoch = 0  # of the next iteration
        self._first = 0  # the position in the epoch where the next iteration begins
        self._epoch_under_way: int | None = None
        self._is_set = False  # the place of the next iteration, since the present one began
        self.position = 0
        self.weight = 1.0
        self.num_samples = 0
        self._present: dict[str, Any] | None = None  # the attributes of the iteration whose are in place
        self._outer: dict[str, Any] | None = None  # of the one on which the engine trains

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or of the rest of one."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """The facts that are equal on all ranks, by their names in an error."""

    def check_place(self) -> None:
        """ValueError if rank and size are defaults, and those of the current communicator have changed."""
        rank, size = _place(None, None) if self.follows_place else (self.rank, self.size)
        if (rank, size) != (self.rank, self.size):
            name = type(self).__name__
            raise ValueError(
                f"the {name} was made for rank {self.rank} of {self.size}, but this is rank {rank} of {size}: "
                "make it after mpi.start(), at the level at which it is used"
            )

    def check_alike(self) -> None:
        """As ``check_place``; then ValueError, on all ranks, if the ranks iterate over different things. Collective.

        Nothing is compared where rank and size were given.
        """
        self.check_place()
        if self.size > 1 and self.follows_place:
            check_equal(f"{type(self).__name__}s", verbs.allgather_object(self._facts()))

    def as_outer(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """The batches of the iteration that has begun; its place is back whenever one within it is over.

        To be closed: an error may keep the loop, and with it the generator, alive.
        """
        before, self._outer = self._outer, self._present
        try:
            yield from batches
        finally:
            self._outer = before
            self._put_outer()

    def take_place(self) -> None:
        """Give the shares of this rank's present rank and size: ranks have died. If they were given, they remain."""
        if self.follows_place:
            self.rank, self.size = _place(None, None)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration run through ``epoch``; the same on every rank."""
        self.epoch, self._is_set = at_least(0, "epoch", epoch), True

    def set_position(self, position: int) -> None:
        """Let the next iteration begin after so many samples of its epoch, over all ranks; the same on every rank."""
        self._first, self._is_set = at_least(0, "position", position), True

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch, as plain data that are equal on all ranks, whatever is read ahead."""
        if (epoch := self._used_epoch()) is None:
            return {"epoch": self.epoch, "position": self._first}
        return {"epoch": epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on at the place of a ``state_dict``, of any number of ranks; the same on all."""
        self.set_epoch(state["epoch"])
        self.set_position(state["position"])

    def _seed_of_workers(self) -> int:
        """A seed for the workers of this rank: follows from seed, epoch and place, and draws nothing."""
        place = np.random.SeedSequence((self.seed, self._epoch_under_way or 0, self.position, self.rank))
        return int(place.generate_state(1)[0])

    def _used_epoch(self) -> int | None:
        """The epoch under way; None before it, after it, and where the next iteration was set to another place."""
        return None if self._is_set else self._epoch_under_way

    def _begin(self) -> tuple[int, int]:
        """Epoch and position of the iteration that begins; the next one is of the next epoch."""
        epoch, first = self.epoch, self._first
        self.epoch, self._first = epoch + 1, 0
        self._epoch_under_way, self.position, self._is_set, self._present = epoch, first, False, None
        return epoch, first

    def _iteration(self, batches: Generator[Any, None, None]) -> Iterator[Any]:
        """The batches of an iteration that has begun, with its attributes in place whenever one is made or given."""
        attributes = self._of_iteration()
        if self._outer is None:
            self._present = attributes
        else:
            self._put_outer()  # until the first batch of the other
        return self._in_place(batches, attributes)

    def _in_place(self, batches: Generator[Any, None, None], attributes: dict[str, Any]) -> Iterator[Any]:
        try:
            with closing(batches):
                while True:
                    self._put(attributes)
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                    attributes.update(self._of_iteration())
                    yield batch
        finally:
            if self._outer is not attributes:
                self._put_outer()

    def _put_outer(self) -> None:
        if self._outer is not None:
            self._put(self._outer)

    def _put(self, attributes: dict[str, Any]) -> None:
        if self._present is not attributes:
            self._present = attributes
            self.__dict__.update(attributes)

    def _of_iteration(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._OF_ITERATION}


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
    with devices.of(device).on(stream):
        batch = tree_map_only(torch.Tensor, lambda tensor: _pinned(tensor).to(device, non_blocking=True), batch)
    stream.synchronize()
    return batch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()


def adopted(batch: Any, device: torch.device | None) -> Any:
    """The batch, after CUDA's allocator is informed that the computing stream uses it."""
    if device is not None and device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(stream), batch)
    return batch


def _indexed(device: torch.device | str | None) -> torch.device | None:
    """The device with its index: "cuda" alone means another device in the prefetching thread than in the caller's."""
    if device is None:
        return None
    named = torch.device(device)
    lacks_index = named.type == "cuda" and named.index is None
    return torch.device("cuda", torch.cuda.current_device()) if lacks_index else named


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    """(rank, size) as given, else of the current communicator, else 0 of 1."""
    if rank is None and size is None:
        return (process.rank(), process.size()) if process.is_started() else (0, 1)
    if rank is None or size is None or not 0 <= rank < size:
        raise ValueError(f"rank={rank}, size={size}: give neither, or both with 0 <= rank < size")
    return rank, size
