"""Each rank's share of a dataset, built ahead of the training loop by a thread.

Vocabulary. A *global batch* is what all ranks together compute on in one step: G = batch_size * size samples, the last
one of an epoch possibly fewer. Epoch e visits the dataset in an *order* drawn from (seed, e), the same on all ranks;
global batch b is ``order[b * G : (b + 1) * G]``, and a rank's *share* of it is one of ``size`` contiguous pieces that
differ by at most one sample.

What follows: every rank takes the same number of steps, whatever the size of the dataset (a rank with one step more
would wait for the others for ever); no sample is dropped (unless asked for), and none is used twice in an epoch; the
global batches depend on G alone, so that 4 ranks of 16 train as 1 rank of 64.

Shares of the last batch may differ, and a plain average over ranks would favour the samples of the small ones. Hence
each batch has a *weight*, num_samples * size / (samples in the global batch): a mean loss scaled by it has gradients
whose average over the ranks is the gradient of the mean over the global batch, exactly. A rank with an empty share gets
one sample to compute on, with weight 0. Layers that need several samples (BatchNorm) want ``drop_last``, which leaves
out an incomplete last global batch: then every share is full.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, TensorDataset, default_collate

from torchmpi_py.memory import devices
from torchmpi_py.runtime import process

T = TypeVar("T")

_END = object()  # behind the last item of a queue


def prefetched(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The same items; a daemon thread computes up to ``depth`` of them ahead, 0: no thread.

    Closing the generator ends the thread: at once, or when the item under construction is done. An exception from
    ``items`` is raised here, in its place in the sequence, with its own traceback.
    """
    if depth == 0:
        yield from items
        return
    ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
    stopped = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, ready, stopped), name="torchmpi_py prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Raised):
                raise item.error
            yield item
    finally:
        stopped.set()
        # The thread puts at most one item after the event is set: an emptied queue has room for it.
        while not ready.empty():
            ready.get_nowait()
        thread.join()


class _Raised(NamedTuple):
    error: BaseException


def _fill(items: Iterable[Any], ready: queue.Queue[Any], stopped: threading.Event) -> None:
    try:
        for item in items:
            ready.put(item)
            if stopped.is_set():
                return
        ready.put(_END)
    except BaseException as error:  # raised again in the loop that uses the items
        ready.put(_Raised(error))


class Share(NamedTuple):
    """Positions ``begin`` to ``end`` of the epoch's order, with their weight in a mean over ranks."""

    begin: int
    end: int
    num_samples: int  # end - begin, or 0 for the stand-in of an empty share
    weight: float


def share(total: int, batch_size: int, batch: int, *, rank: int, size: int) -> Share:
    """The share of ``rank`` in global batch ``batch`` of a dataset of ``total`` samples. Pure arithmetic."""
    first = batch * batch_size * size
    count = min(batch_size * size, total - first)
    begin = first + rank * count // size
    end = first + (rank + 1) * count // size
    if begin == end:
        return Share(first, first + 1, 0, 0.0)
    return Share(begin, end, end - begin, (end - begin) * size / count)


class DatasetIterator:
    """The batches of this rank, epoch after epoch.

    ``batch_size`` is per rank. Iterating runs through one epoch and moves on to the next one's order; ``set_epoch``
    chooses another (the engine calls it). All ranks must iterate alike. ``rank`` and ``size`` default to those of the
    current communicator, or to 0 of 1 when the package is not started. ``prefetch`` batches are built ahead by a thread
    (0: none, inline), and moved to ``device`` if one is given; an error in the dataset surfaces in the loop. A batch is
    ``collate_fn`` of a list of samples (default: torch's), or the indexed tensors of a TensorDataset. ``drop_last``
    leaves out the last global batch of an epoch if it is incomplete (other samples in each epoch, with ``shuffle``).

    The thread shares the global random generators (torch's, numpy's, Python's) with the training loop, and who draws
    first is chance. A dataset with random augmentation should draw from a generator of its own, or be given
    ``prefetch=0``; else runs are not reproducible.

    With each batch the attributes ``weight`` and ``num_samples`` are set, as the module docstring explains, and
    ``position``: how many samples of the epoch all ranks have used with this batch. The engine reads them. After
    ``set_position`` the next iteration begins there, with any number of ranks: no sample is used twice or left out.
    Raises TypeError for a dataset without length and indexing, ValueError for one without a batch, or a number out of
    range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"dataset is a {type(dataset).__name__}; it must have a length and be indexed by integers")
        self.rank, self.size = _place(rank, size)
        self._place_given = rank is not None
        self.dataset = dataset
        self.total = len(dataset)
        self.batch_size = _at_least(1, "batch_size", batch_size)
        self.shuffle = shuffle
        self.seed = _at_least(0, "seed", seed)
        self.prefetch = _at_least(0, "prefetch", prefetch)
        self.device = _indexed(device)
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.epoch = 0  # of the next iteration
        self._first = 0  # the position in the epoch where the next iteration begins
        self.position = 0
        self.weight = 1.0
        self.num_samples = 0
        if self.total == 0:
            raise ValueError("the dataset is empty: there is nothing to iterate over")
        if len(self) == 0:
            raise ValueError(
                f"drop_last=True leaves nothing of {self.total} samples: batch_size={batch_size} on {self.size} ranks "
                "is more; take a smaller batch_size"
            )

    def __len__(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return self._num_batches(self.total)

    def _num_batches(self, num_samples: int) -> int:
        full, rest = divmod(num_samples, self.batch_size * self.size)
        return full + (rest > 0 and not self.drop_last)

    def check_place(self) -> None:
        """ValueError if rank and size are defaults, and those of the current communicator have changed."""
        rank, size = (self.rank, self.size) if self._place_given else _place(None, None)
        if (rank, size) != (self.rank, self.size):
            raise ValueError(
                f"the DatasetIterator was made for rank {self.rank} of {self.size}, but this is rank {rank} of {size}: "
                "make it after mpi.start(), at the level at which it is used (or give it rank= and size=)"
            )

    @property
    def follows_place(self) -> bool:
        """Whether rank and size are those of the current communicator, and were not given."""
        return not self._place_given

    def take_place(self) -> None:
        """Give the shares of this rank's present rank and size: ranks have died. If they were given, they remain."""
        if not self._place_given:
            self.rank, self.size = _place(None, None)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration run through ``epoch``; the same on every rank."""
        self.epoch = _at_least(0, "epoch", epoch)

    def set_position(self, position: int) -> None:
        """Let the next iteration begin after so many samples of its epoch, over all ranks; the same on every rank."""
        if _at_least(0, "position", position) > self.total:
            raise ValueError(f"position={position} is beyond the dataset, which has {self.total} samples")
        self._first = position

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self.epoch, self._first
        self.epoch, self._first = epoch + 1, 0
        return self._batches(self.order(epoch), first)

    def order(self, epoch: int) -> torch.Tensor:
        """The indices of the dataset in the order of this epoch: a function of (seed, epoch) alone."""
        if not self.shuffle:
            return torch.arange(self.total, device="cpu")
        return torch.from_numpy(np.random.default_rng((self.seed, epoch)).permutation(self.total))

    def _batches(self, order: torch.Tensor, first: int) -> Iterator[Any]:
        order = order[first:]
        num_batches = self._num_batches(len(order))
        shares = [share(len(order), self.batch_size, b, rank=self.rank, size=self.size) for b in range(num_batches)]
        with closing(self._loaded([order[s.begin : s.end] for s in shares])) as batches:
            for number, (mine, batch) in enumerate(zip(shares, batches, strict=True), 1):
                self.weight, self.num_samples = mine.weight, mine.num_samples
                self.position = min(first + number * self.batch_size * self.size, self.total)
                yield batch

    def _loaded(self, pieces: list[torch.Tensor]) -> Generator[Any, None, None]:
        """A batch of each of these pieces of the order, in turn."""
        with closing(prefetched((self._load(indices) for indices in pieces), self.prefetch)) as batches:
            for batch in batches:
                yield _adopted(batch, self.device)

    def _load(self, indices: torch.Tensor) -> Any:
        if type(self.dataset) is TensorDataset and self.collate_fn is None:
            batch: Any = tuple(tensor[indices] for tensor in self.dataset.tensors)
        else:
            batch = (self.collate_fn or default_collate)(_items(self.dataset, indices.tolist()))
        return _moved(batch, self.device)


def _items(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The samples; in one call if the dataset offers that (torch's own protocol for batched fetching)."""
    if callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def _moved(batch: Any, device: torch.device | None) -> Any:
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


def _adopted(batch: Any, device: torch.device | None) -> Any:
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


def _at_least(least: int, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    return value
