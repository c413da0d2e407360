"""Shares, orders, prefetching. No MPI: rank and size are given."""

import threading
import time
import traceback

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from torchmpi_py.engine import DatasetIterator, SGDEngine
from torchmpi_py.engine.iterators import prefetched, share

SIZES = range(1, 38)


def num_batches(total, batch_size, size):
    return -(-total // (batch_size * size))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("total", [1, 2, 36, 37, 100, 1437])
def test_shares_cover_each_global_batch_once_and_evenly(total, batch_size):
    for size in SIZES:
        for batch in range(num_batches(total, batch_size, size)):
            shares = [share(total, batch_size, batch, rank=rank, size=size) for rank in range(size)]
            first = batch * batch_size * size
            count = min(batch_size * size, total - first)
            real = [one for one in shares if one.num_samples]
            assert [i for one in real for i in range(one.begin, one.end)] == list(range(first, first + count))
            assert max(one.num_samples for one in shares) - min(one.num_samples for one in shares) <= 1
            assert max(one.num_samples for one in shares) <= batch_size
            assert all(one[:2] == (first, first + 1) and one.weight == 0 for one in shares if not one.num_samples)
            assert sum(one.weight for one in shares) / size == pytest.approx(1, rel=1e-12)
            if count == batch_size * size:
                assert {one.weight for one in shares} == {1.0}


def test_weighted_mean_over_ranks_is_the_mean_over_the_global_batch():
    values = torch.randn(23, dtype=torch.float64)
    for size in SIZES:
        for batch in range(num_batches(23, 2, size)):
            shares = [share(23, 2, batch, rank=rank, size=size) for rank in range(size)]
            mean = sum(one.weight * values[one.begin : one.end].mean() for one in shares) / size
            assert mean == pytest.approx(values[batch * 2 * size : (batch + 1) * 2 * size].mean().item())


def numbers(total):
    return TensorDataset(torch.arange(total), torch.arange(total) % 2)


def epoch_of(total, batch_size, **options):
    return [batch[0].tolist() for batch in DatasetIterator(numbers(total), batch_size, **options)]


def test_global_batches_depend_on_their_size_alone():
    alone = epoch_of(50, 12, seed=3)
    for size in (2, 3, 4, 6):
        ranks = [epoch_of(50, 12 // size, seed=3, rank=rank, size=size) for rank in range(size)]
        together = [[i for rank in ranks for i in rank[b]] for b in range(len(alone))]
        assert together[:-1] == alone[:-1]
        assert set(together[-1]) == set(alone[-1])
        assert sorted(i for batch in alone for i in batch) == list(range(50))


def test_orders_follow_seed_and_epoch():
    iterator = DatasetIterator(numbers(30), 30, seed=1)
    first, second = (next(iter(iterator))[0].tolist() for _ in range(2))
    assert first != second
    iterator.set_epoch(0)
    assert next(iter(iterator))[0].tolist() == first
    assert epoch_of(30, 30, seed=2)[0] not in (first, second)
    assert epoch_of(30, 7, shuffle=False) == [list(range(30))[i : i + 7] for i in range(0, 30, 7)]


def test_the_engine_tells_the_epoch():
    iterator = DatasetIterator(TensorDataset(torch.arange(8.0).view(8, 1), torch.zeros(8, 1)), 8)
    engine = SGDEngine()
    orders = []
    engine.hooks.on_sample = lambda state: orders.append(state.sample[0].flatten().tolist())
    for _ in range(2):
        engine.train(network=torch.nn.Linear(1, 1), criterion=torch.nn.MSELoss(), iterator=iterator, lr=0, maxepoch=2)
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_weight_and_number_stand_beside_their_batch(prefetch):
    iterator = DatasetIterator(numbers(9), 2, shuffle=False, rank=2, size=4, prefetch=prefetch)
    seen = [(batch[0].tolist(), iterator.num_samples, iterator.weight) for batch in iterator]
    assert len(iterator) == 2
    assert seen == [([4, 5], 2, 1.0), ([8], 0, 0.0)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
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


def test_batch_statistics_with_a_rest_of_one_sample():
    options = {
        "network": torch.nn.BatchNorm1d(1),
        "criterion": torch.nn.MSELoss(),
        "lr": 0.1,
    }
    dataset = TensorDataset(torch.randn(9, 1), torch.randn(9, 1))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SGDEngine().train(iterator=DatasetIterator(dataset, 4), **options)
    assert SGDEngine().train(iterator=DatasetIterator(dataset, 4, drop_last=True), **options).t == 2


class Squares(Dataset):
    """Items that are no tensors, and a way to fail."""

    def __init__(self, total, fail_at=None):
        self.total, self.fail_at = total, fail_at

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        if index == self.fail_at:
            raise LookupError(f"no square {index}")
        return float(index), index * index


def test_items_are_collated():
    batches = list(DatasetIterator(Squares(5), 3, shuffle=False))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4]]
    assert [batch[1].tolist() for batch in batches] == [[0, 1, 4], [9, 16]]
    (batch,) = DatasetIterator(Squares(3), 3, shuffle=False, collate_fn=tuple)
    assert batch == ((0.0, 0), (1.0, 1), (2.0, 4))


def test_fast_path_and_collation_agree():
    fast = list(DatasetIterator(numbers(20), 6, seed=5))
    slow = list(DatasetIterator(torch.utils.data.Subset(numbers(20), range(20)), 6, seed=5))
    for one, other in zip(fast, slow, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_batches_go_to_the_device():
    (batch,) = DatasetIterator(numbers(2), 2, device="meta")
    assert {x.device.type for x in batch} == {"meta"}


def prefetching():
    return [thread for thread in threading.enumerate() if thread.name == "torchmpi_py prefetch"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_leaving_early_ends_the_thread(depth):
    for batch in DatasetIterator(Squares(1000), 1, prefetch=depth):
        assert batch
        assert len(prefetching()) == 1
        break
    assert prefetching() == []


@pytest.mark.timeout(20)
def test_an_error_in_the_loop_ends_the_thread():
    engine = SGDEngine()
    engine.hooks.on_forward = lambda state: 1 / 0
    iterator = DatasetIterator(TensorDataset(torch.randn(100, 1), torch.randn(100, 1)), 1)
    with pytest.raises(ZeroDivisionError):
        engine.train(network=torch.nn.Linear(1, 1), criterion=torch.nn.MSELoss(), iterator=iterator, lr=0.1)
    assert prefetching() == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_the_dataset_surfaces_in_its_place(prefetch):
    batches = iter(DatasetIterator(Squares(9, fail_at=5), 2, shuffle=False, prefetch=prefetch))
    assert [next(batches)[0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(LookupError, match="no square 5") as caught:
        next(batches)
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert prefetching() == []


@pytest.mark.timeout(240)
def test_prefetching_works_ahead_within_its_depth():
    made = []

    def items():
        for i in range(10):
            made.append(i)
            yield i

    ahead = prefetched(items(), 3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 60
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3, 4]  # one given, three waiting, one in the hand of the thread
    assert list(ahead) == list(range(1, 10))
    assert prefetching() == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_next_sample_is_read_during_the_step_if_it_is_prefetched(prefetch):
    read = threading.Semaphore(0)

    class Announced(Squares):
        def __getitem__(self, index):
            read.release()
            return super().__getitem__(index)

    for number, _ in enumerate(DatasetIterator(Announced(10), 1, prefetch=prefetch)):
        for _ in range({0: 2, 9: 0}.get(number, 1) if prefetch else 1):  # up to the sample after this one
            assert read.acquire(timeout=30)
        assert prefetch or not read.acquire(blocking=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": -3}, ValueError),
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
