"""Shares, orders, prefetching. No MPI: rank and size are given."""

import contextlib
import gc
import time
import traceback
import weakref

import pytest
import torch
from runs import prefetching, train
from support import jobs
from torch.utils.data import Dataset, Subset, TensorDataset

from torchmpi_py.engine import DatasetIterator, SGDEngine
from torchmpi_py.engine.iterators import share


@pytest.mark.parametrize(("total", "batch_size"), [(1, 3), (2, 1), (36, 3), (37, 8), (100, 1), (1437, 8)])
def test_shares_cover_each_global_batch_once_and_evenly(total, batch_size):
    for size in range(1, 38):
        for batch in range(-(-total // (batch_size * size))):
            count = min(batch_size * size, total - batch * batch_size * size)
            shares = [range(count)[share(count, rank, size)] for rank in range(size)]
            lengths = [len(one) for one in shares]
            assert [i for one in shares for i in one] == list(range(count))
            assert batch_size >= lengths[0] == max(lengths) <= min(lengths) + 1


def numbers(total):
    return TensorDataset(torch.arange(total), torch.arange(total) % 2)


def epoch_of(total, batch_size, **options):
    return [batch and batch[0].tolist() for batch in DatasetIterator(numbers(total), batch_size, **options)]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_dropping_the_last_batch_leaves_full_shares(size):
    kept, every = (
        [epoch_of(50, 12 // size, rank=rank, size=size, drop_last=drop) for rank in range(size)]
        for drop in (True, False)
    )
    assert kept == [batches[:4] for batches in every]
    assert {len(batch) for batches in kept for batch in batches} == {12 // size}
    iterator = DatasetIterator(numbers(48), 12 // size, rank=0, size=size, drop_last=True)
    assert len(iterator) == len(list(iterator)) == 4  # a last batch that is complete stays
    assert (iterator.weight, iterator.num_samples) == (1.0, 12 // size)


def test_orders_follow_seed_and_epoch():
    iterator = DatasetIterator(numbers(30), 30, seed=1)
    first, second = (next(iter(iterator))[0].tolist() for _ in range(2))
    assert first != second
    iterator.set_epoch(0)
    assert next(iter(iterator))[0].tolist() == first
    assert epoch_of(30, 30, seed=2)[0] not in (first, second)
    assert epoch_of(30, 7, shuffle=False) == [list(range(30))[i : i + 7] for i in range(0, 30, 7)]
    # The engine tells the epoch.
    iterator, orders = DatasetIterator(TensorDataset(torch.arange(8.0).view(8, 1), torch.zeros(8, 1)), 8), []
    hooks = {"on_sample": lambda state: orders.append(state.sample[0].flatten().tolist())}
    for _ in range(2):
        train(torch.nn.Linear(1, 1), iterator, engine=SGDEngine(), lr=0, maxepoch=2, **hooks)
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_weight_and_number_stand_beside_their_batch(prefetch):
    for rank, total, last in ((2, 9, (None, 0, 0.0)), (0, 9, ([8], 1, 4.0)), (0, 14, ([8, 9], 2, 4 / 3))):
        iterator = DatasetIterator(numbers(total), 2, shuffle=False, rank=rank, size=4, prefetch=prefetch)
        seen = [(batch and batch[0].tolist(), iterator.num_samples, iterator.weight) for batch in iterator]
        assert len(iterator) == 2
        assert seen == [([2 * rank, 2 * rank + 1], 2, 1.0), last]
        assert iterator.may_give_none() == (total == 9)


def test_batch_statistics_with_a_rest_of_one_sample():
    dataset = TensorDataset(torch.randn(9, 1), torch.randn(9, 1))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        train(torch.nn.BatchNorm1d(1), DatasetIterator(dataset, 4), engine=SGDEngine())
    assert train(torch.nn.BatchNorm1d(1), DatasetIterator(dataset, 4, drop_last=True), engine=SGDEngine()).t == 2


class Squares(Dataset):
    """Items that are no tensors, the indices that were read, and a way to fail."""

    def __init__(self, total, fail_at=None):
        self.total, self.fail_at, self.read = total, fail_at, []

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        if index == self.fail_at:
            raise LookupError(f"no square {index}")
        self.read.append(index)
        return float(index), index * index


def test_items_are_collated_and_moved():
    batches = list(DatasetIterator(Squares(5), 3, shuffle=False))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4]]
    assert [batch[1].tolist() for batch in batches] == [[0, 1, 4], [9, 16]]
    assert list(DatasetIterator(Squares(3), 3, shuffle=False, collate_fn=tuple)) == [((0.0, 0), (1.0, 1), (2.0, 4))]
    fast = list(DatasetIterator(numbers(20), 6, seed=5))
    slow = list(DatasetIterator(Subset(numbers(20), range(20)), 6, seed=5))
    torch.testing.assert_close(fast, [tuple(batch) for batch in slow], rtol=0, atol=0)
    (batch,) = DatasetIterator(numbers(2), 2, device="meta")
    assert {x.device.type for x in batch} == {"meta"}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_that_was_handled_keeps_no_iterator(prefetch):
    """Else its workers would end when the garbage is collected, each seconds late."""
    iterator = DatasetIterator(Squares(8, fail_at=5), 2, prefetch=prefetch)
    with contextlib.suppress(LookupError):
        list(iterator)
    kept = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("prefetch", [1, 5])
def test_leaving_early_ends_the_thread(prefetch):
    for batch in DatasetIterator(Squares(1000), 1, prefetch=prefetch):
        assert batch
        assert len(prefetching()) == 1
        break
    assert prefetching() == []
    iterator = DatasetIterator(TensorDataset(torch.randn(100, 1), torch.randn(100, 1)), 1, prefetch=prefetch)
    with pytest.raises(ZeroDivisionError):
        train(torch.nn.Linear(1, 1), iterator, engine=SGDEngine(), on_forward=lambda state: 1 / 0)
    assert prefetching() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_the_dataset_surfaces_in_its_place(prefetch):
    batches = iter(DatasetIterator(Squares(9, fail_at=5), 2, shuffle=False, prefetch=prefetch))
    assert [next(batches)[0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(LookupError, match="no square 5") as caught:
        next(batches)
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert prefetching() == []


@pytest.mark.parametrize(("prefetch", "ahead"), [(0, 0), (1, 1), (3, 3)])
def test_prefetching_works_ahead_within_its_depth(prefetch, ahead):
    """While a batch is used, so many are ready or under construction."""
    dataset = Squares(10)
    batches = iter(DatasetIterator(dataset, 1, shuffle=False, prefetch=prefetch))
    for used in range(1, 3):
        next(batches)
        jobs.until(lambda expected=used + ahead: len(dataset.read) >= expected)
        time.sleep(0.05)
        assert dataset.read == list(range(used + ahead))
    assert [batch[0].item() for batch in batches] == list(range(2, 10))
    assert prefetching() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 2.0}, TypeError),
        ({"batch_size": 1, "prefetch": -1}, ValueError),
        ({"batch_size": 1, "seed": -1}, ValueError),
        ({"batch_size": 1, "rank": 2, "size": 2}, ValueError),
        ({"batch_size": 1, "rank": 0}, ValueError),
        ({"batch_size": 1, "dataset": numbers(0)}, ValueError),
        ({"batch_size": 2, "rank": 0, "size": 2, "drop_last": True}, ValueError),
        ({"batch_size": 1, "dataset": iter([1])}, TypeError),
    ],
)
def test_nonsense_is_refused(options, error):
    with pytest.raises(error):
        DatasetIterator(**{"dataset": numbers(3), **options})
