"""Several sources in one order, and samplers in place of an order: every sample once, on any number of ranks."""

import threading
from itertools import islice

import pytest
import torch
from runs import epoch_of, numbers_in, on_few, prefetching, sample_of, together, trained
from support import jobs
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from torchmpi_py.engine import DatasetIterator, SGDEngine, Source

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]
SIZES = (29, 7, 16)
TOTAL = sum(SIZES)


class Numbers(Dataset):
    """Samples (input, number over all sources), and whether one was read."""

    def __init__(self, first, total, fail_at=None):
        self.first, self.total, self.fail_at = first, total, fail_at
        self.is_read = False

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        self.is_read = True
        if not 0 <= index < self.total:
            raise IndexError(index)
        if index == self.fail_at:
            raise LookupError(f"no number {index}")
        return sample_of(self.first + index)


def datasets():
    return [Numbers(sum(SIZES[:i]), size) for i, size in enumerate(SIZES)]


def sources(num_workers=0):
    """One of each kind: read by a thread, inline, and by processes where there are any."""
    first, second, third = datasets()
    return [Source(first, prefetch=3), Source(second, prefetch=0), Source(third, num_workers=num_workers)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_of_three_sources_once_in_an_epoch(mpi, num_workers):
    """Also after an iteration that was left, which leaves no thread."""
    iterator = DatasetIterator(sources(num_workers), 3, seed=4)
    for _ in iterator:
        break
    assert prefetching() == []
    epochs = [epoch_of(mpi, iterator) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(TOTAL))] * 2
    assert epochs[0] != epochs[1]
    assert len(iterator) == -(-TOTAL // (3 * mpi.size()))


class Gated(Numbers):
    """A database that answers when asked to."""

    def __init__(self, first, total):
        super().__init__(first, total)
        self.gate = threading.Event()

    def __getitem__(self, index):
        assert self.gate.wait(60)
        return super().__getitem__(index)


def test_a_slow_source_does_not_hold_up_another(mpi):
    slow, fast = Gated(0, 8), Numbers(8, 8)
    read = DatasetIterator([Source(slow, prefetch=1), Source(fast, prefetch=4)], 2, prefetch=1, rank=0, size=1)
    batches = iter(read)
    taker = threading.Thread(target=next, args=(batches,))
    taker.start()
    try:
        jobs.until(lambda: fast.is_read)
        assert not slow.is_read
    finally:
        slow.gate.set()
        taker.join()
        batches.close()


@pytest.mark.parametrize(("num_workers", "steps"), [(0, 1), (0, 2), (2, 2)])
def test_the_rest_of_an_epoch(mpi, steps, num_workers):
    """On the same number of ranks, and on fewer."""

    def resumed(batch_size, num_workers):
        again = DatasetIterator(sources(num_workers), batch_size, seed=2)
        again.load_state_dict(state)
        return again

    iterator = DatasetIterator(sources(num_workers), 3, seed=2)
    whole = iter(iterator)
    used = together(mpi, [n for _ in range(steps) for n in numbers_in(next(whole), iterator.num_samples)])
    state = iterator.state_dict()
    whole.close()
    again = resumed(3, num_workers)
    assert sorted(used + epoch_of(mpi, again)) == list(range(TOTAL))
    assert sorted(epoch_of(mpi, again)) == list(range(TOTAL))  # the next epoch is whole
    if mpi.size() > 1:
        assert sorted(used + on_few(mpi, lambda: epoch_of(mpi, resumed(5, 0)))) == list(range(TOTAL))


@pytest.mark.parametrize("make", [lambda: sources(0), lambda: sources(2), None], ids=["inline", "workers", "loader"])
def test_training_is_that_of_one_process(mpi, make):
    """Also of a DataLoader, which the engine divides where there are several ranks."""
    whole = ConcatDataset(datasets())
    mine = trained(DatasetIterator(make(), 4) if make else DataLoader(whole, 4, shuffle=mpi.size() > 1))
    joined = DatasetIterator(whole, 4 * mpi.size(), rank=0, size=1, shuffle=bool(make) or mpi.size() > 1)
    torch.testing.assert_close(mine, trained(joined, engine=SGDEngine()), rtol=1e-9, atol=1e-9)


def generator():
    return torch.Generator().manual_seed(3)


def sampled(sampler):
    return DatasetIterator(sources(), 3, sampler=sampler)


ITERATORS = {
    "DataLoader": lambda: DataLoader(ConcatDataset(datasets()), 3, shuffle=True),
    "global generator": lambda: sampled(RandomSampler(range(TOTAL))),
    "no sampler": lambda: sampled(None),
    "own generator": lambda: sampled(RandomSampler(range(TOTAL), generator=generator())),
    "with replacement": lambda: sampled(WeightedRandomSampler(torch.arange(1.0, 53), 40, generator=generator())),
}
DAILY = ("DataLoader", "global generator")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in DAILY)) for kind in ITERATORS]
)
def test_a_checkpoint_in_the_middle_of_an_epoch(mpi, folder, kind):
    def run(**options):
        return trained(ITERATORS[kind](), **options)

    expected = run()
    for killed_at in (2, -(-TOTAL // (3 * mpi.size())) + 2):  # in the first and the second epoch
        assert run(killed_at=killed_at, checkpoint=folder, every=1) is None
    assert torch.equal(run(checkpoint=folder, every=1), expected)


class Epochs(SequentialSampler):
    """It draws from the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(len(self), generator=generator).tolist())


def test_a_sampler_gives_the_order(mpi):
    iterator = DatasetIterator(sources(), 3, sampler=Epochs(range(TOTAL)))
    orders = [iterator.order(epoch).tolist() for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(epoch_of(mpi, iterator)) == list(range(TOTAL))
    few = DatasetIterator(datasets()[0], 3, sampler=[5, 5, 28, 0])
    assert (few.total, len(few)) == (4, -(-4 // (3 * mpi.size())))
    assert sorted(epoch_of(mpi, few)) == sorted(epoch_of(mpi, few)) == [0, 5, 5, 28]


class Moving(Epochs):
    """Another order at each iteration, which follows from nothing that the iterator knows."""

    def set_epoch(self, epoch):
        self.epoch += 7


@pytest.mark.mpi(min_size=2)
def test_an_epoch_that_was_under_way_keeps_the_order_of_its_sampler(mpi):
    """Where ranks have died: here all but the first, from whose view there are fewer."""
    sampler = Moving(range(TOTAL))
    iterator = DatasetIterator(sources(), 3, sampler=sampler, prefetch=0)

    def run(first, batches):
        iterator.set_epoch(1)
        iterator.set_position(first)
        return [number for batch in islice(iterator, batches) for number in numbers_in(batch, iterator.num_samples)]

    begun, rest, is_left = together(mpi, run(0, 2)), [], mpi.rank() == 0
    with mpi.at(mpi.push_communicator(is_left)):
        if is_left:
            iterator.take_place()
            rest = run(len(begun), TOTAL)
    rest = together(mpi, rest)
    assert sorted(begun + rest) == list(range(TOTAL))
    assert sampler.epoch == 7  # asked once


@pytest.mark.mpi(min_size=2)
def test_what_differs_between_ranks_is_refused_on_all(mpi):
    is_last = mpi.rank() == mpi.size() - 1
    with pytest.raises(ValueError, match=r"the ranks' samplers differ: .* of epoch 0 is \[.*make it equal on all"):
        iter(DatasetIterator(sources(), 3, sampler=[5, 4] if is_last else [4, 5]))
    less = [Subset(each, range(len(each) - is_last)) for each in datasets()]
    with pytest.raises(ValueError, match=rf"number of samples is \[52, .*{TOTAL - 3}\]"):
        trained(DatasetIterator(less, 3))
    with pytest.raises(ValueError, match=r"sizes of sources is \[\[29, 7, 16\], .*\[16, 7, 29\]\]"):
        trained(DatasetIterator(datasets()[:: -1 if is_last else 1], 3))
    with pytest.raises(ValueError, match="seed is"):
        trained(DatasetIterator(sources(), 3, seed=mpi.rank()))


@pytest.mark.parametrize("options", [{"prefetch": 2}, {"prefetch": 0}, {"num_workers": 1}])
def test_a_source_that_raises_is_named(mpi, options):
    parts = [datasets()[0], Source(Numbers(29, 7, fail_at=5), **options)]
    iterator = DatasetIterator(parts, 4, shuffle=False, rank=0, size=1)
    seen = []
    with pytest.raises(RuntimeError, match=r"(?s)source 1 \(Numbers\) .*LookupError: .*no number 5") as caught:
        seen.extend(number for batch in iterator for number in numbers_in(batch, iterator.num_samples))
    assert seen == list(range(32))
    assert isinstance(caught.value.__cause__, LookupError)
    assert prefetching() == []


def test_nonsense_is_refused(mpi):
    with pytest.raises(ValueError, match=r"source 1 \(TensorDataset\) is empty"):
        DatasetIterator([datasets()[0], TensorDataset(torch.zeros(0, 1))], 2)
    with pytest.raises(ValueError, match="there is no batch in 0 samples"):
        DatasetIterator(sources(), 2, sampler=[])
    with pytest.raises(TypeError, match="generator, which has no length"):
        DatasetIterator(sources(), 2, sampler=(index for index in range(3)))
    for index in (TOTAL, -1):
        with pytest.raises(ValueError, match=rf"index {index} is out of range; use 0 to {TOTAL - 1}"):
            iter(DatasetIterator(sources(), 3, sampler=[0, index]))
    with pytest.raises(TypeError, match="dataset is a set"):
        Source({1, 2})
    for name in ("prefetch", "num_workers"):
        with pytest.raises(ValueError, match=f"{name}=-1: pass an integer of at least 0"):
            Source(datasets()[0], **{name: -1})
    assert [len(batch) for batch in DatasetIterator([3, 4, 5], 4, rank=0, size=1)] == [3]  # a list of samples
