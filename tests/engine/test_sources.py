"""Several sources in one order, and samplers in place of an order: every sample once, on any number of ranks."""

import threading
import time
from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, Subset, TensorDataset, WeightedRandomSampler

from torchmpi_py import errors
from torchmpi_py.engine import AllReduceSGDEngine, Checkpoints, DatasetIterator, SGDEngine, Source, resume

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]
SIZES = (29, 7, 16)
TOTAL = sum(SIZES)


class Numbers(Dataset):
    """Samples (input, number over all sources), and the threads that have read them."""

    def __init__(self, first, total, fail_at=None):
        self.first, self.total, self.fail_at = first, total, fail_at
        self.threads = set()

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        self.threads.add(threading.get_ident())
        if not 0 <= index < self.total:
            raise IndexError(index)
        if index == self.fail_at:
            raise LookupError(f"no number {index}")
        number = self.first + index
        return torch.tensor([number % 7, number % 3, 1.0], dtype=torch.float64), torch.tensor([float(number)]).double()


def datasets():
    firsts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    return [Numbers(first, size) for first, size in zip(firsts, SIZES, strict=True)]


def sources(num_workers=0):
    """One of each kind: read by a thread, inline, and by processes where there are any."""
    first, second, third = datasets()
    return [Source(first, prefetch=3), Source(second, prefetch=0), Source(third, num_workers=num_workers)]


def numbers_of(iterator, batch):
    return batch[1][: iterator.num_samples, 0].int().tolist()


def together(mpi, mine):
    return [number for part in mpi.allgather_object(mine) for number in part]


def epoch_of(mpi, iterator):
    return together(mpi, [number for batch in iterator for number in numbers_of(iterator, batch)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_of_three_sources_once_in_an_epoch(mpi, num_workers):
    iterator = DatasetIterator(sources(num_workers), 3, seed=4)
    epochs = [epoch_of(mpi, iterator) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(TOTAL))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(iterator) == -(-TOTAL // (3 * mpi.size()))


def test_batches_are_those_of_the_datasets_behind_each_other(mpi):
    joined = torch.utils.data.ConcatDataset(datasets())
    for one, other in zip(DatasetIterator(sources(), 4), DatasetIterator(joined, 4), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_each_source_has_a_thread_of_its_own(mpi):
    parts = datasets()
    list(DatasetIterator([Source(part) for part in parts], 4, prefetch=0, rank=0, size=1))
    list(DatasetIterator(parts[0], 4, prefetch=0, rank=0, size=1))  # a single dataset: the thread that iterates
    threads = [part.threads for part in parts]
    assert len(threads[0] - {threading.get_ident()}) == 1
    assert threading.get_ident() in threads[0]
    assert all(len(each) == 1 for each in threads[1:])
    assert not threads[0] & threads[1]


class Gated(Numbers):
    """A database that answers when asked to."""

    def __init__(self, first, total):
        super().__init__(first, total)
        self.gate = threading.Event()

    def __getitem__(self, index):
        assert self.gate.wait(20)
        return super().__getitem__(index)


def test_a_slow_source_does_not_hold_up_another(mpi):
    slow, fast = Gated(0, 8), Numbers(8, 8)
    read = DatasetIterator([Source(slow, prefetch=1), Source(fast, prefetch=4)], 2, prefetch=1, rank=0, size=1)
    batches = iter(read)
    taker = threading.Thread(target=next, args=(batches,))
    taker.start()
    try:
        deadline = time.monotonic() + 20
        while not fast.threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert fast.threads
        assert not slow.threads
    finally:
        slow.gate.set()
        taker.join()
        batches.close()


def place_in(mpi, few):
    """A level of the first ``few`` ranks, and one of the rest."""
    return mpi.push_communicator(mpi.rank() < few)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_rest_of_an_epoch(mpi, steps, num_workers):
    """On the same number of ranks, and on fewer."""
    iterator = DatasetIterator(sources(num_workers), 3, seed=2)
    whole = iter(iterator)
    used = together(mpi, [n for _ in range(steps) for n in numbers_of(iterator, next(whole))])
    state = iterator.state_dict()
    whole.close()
    few = (mpi.size() + 1) // 2
    again = DatasetIterator(sources(num_workers), 3, seed=2)
    again.load_state_dict(state)
    assert sorted(used + epoch_of(mpi, again)) == list(range(TOTAL))
    assert sorted(epoch_of(mpi, again)) == list(range(TOTAL))  # the next epoch is whole
    is_few, level = mpi.rank() < few, place_in(mpi, few)
    rest = []
    with mpi.at(level):
        if is_few:
            again = DatasetIterator(sources(), 5, seed=2)
            again.load_state_dict(state)
            rest = epoch_of(mpi, again)
    assert sorted(used + mpi.broadcast_object(rest)) == list(range(TOTAL))


def test_a_state_between_epochs_is_of_the_next_one(mpi):
    iterator = DatasetIterator(sources(), 3)
    assert iterator.state_dict()["position"] == 0
    list(iterator)
    state = iterator.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    again = DatasetIterator(sources(), 3)
    again.load_state_dict(state)
    assert epoch_of(mpi, again) == epoch_of(mpi, iterator)


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1).double()


def trained(engine, iterator, **options):
    net = network()
    engine.train(network=net, criterion=torch.nn.MSELoss(), iterator=iterator, lr=1e-4, maxepoch=2, **options)
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_is_that_of_one_process(mpi, num_workers):
    mine = trained(AllReduceSGDEngine(), DatasetIterator(sources(num_workers), 4, seed=1))
    joined = torch.utils.data.ConcatDataset(datasets())
    one = trained(SGDEngine(), DatasetIterator(joined, 4 * mpi.size(), seed=1, rank=0, size=1))
    torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-9)


class Killed(Exception):
    """Stands for a kill, in between steps, on all ranks."""


def own_generator():
    return RandomSampler(range(TOTAL), generator=torch.Generator().manual_seed(3))


SAMPLERS = {
    "no sampler": lambda: None,
    "own generator": own_generator,
    "global generator": lambda: RandomSampler(range(TOTAL)),
    "with replacement": lambda: WeightedRandomSampler(
        torch.arange(1.0, TOTAL + 1), 40, generator=torch.Generator().manual_seed(3)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_checkpoint_in_the_middle_of_an_epoch(mpi, folder, kind):
    def run(killed_at=None, **options):
        def on_update(state):
            if state.t == killed_at:
                raise Killed

        resume.completed.clear()
        torch.manual_seed(5)  # the same on all ranks: the sampler may draw from it
        engine = AllReduceSGDEngine()
        engine.hooks.on_update = on_update
        try:
            return trained(engine, DatasetIterator(sources(), 3, sampler=SAMPLERS[kind]()), **options)
        except Killed:
            return None

    expected = run()
    steps = len(DatasetIterator(sources(), 3, sampler=SAMPLERS[kind]()))
    for killed_at in (2, steps + 2):
        assert run(killed_at, checkpoint=folder, every=1) is None
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


def test_a_state_in_another_order_is_refused_on_all_ranks(mpi):
    state = {"epoch": 0, "position": 6, "order": "0123456789abcdef"}
    iterator = DatasetIterator(sources(), 3)
    iterator.load_state_dict(state)
    with pytest.raises(ValueError, match="after 6 samples of epoch 0 is in another order"):
        iter(iterator)


class Moving(Epochs):
    """Another order at each iteration, which follows from nothing that the iterator knows."""

    def set_epoch(self, epoch):
        self.epoch += 7


def test_an_epoch_that_was_under_way_keeps_the_order_of_its_sampler(mpi):
    iterator = DatasetIterator(sources(), 3, sampler=Moving(range(TOTAL)), prefetch=0)

    def run(first, batches):
        iterator.set_epoch(1)
        iterator.set_position(first)
        return [number for batch in islice(iterator, batches) for number in numbers_of(iterator, batch)]

    begun = run(0, 2)
    iterator.take_place()
    rest = run(6 * mpi.size(), TOTAL)
    assert sorted(together(mpi, begun + rest)) == list(range(TOTAL))
    assert iterator.sampler.epoch == 7
    again = run(0, TOTAL)  # the epoch is over: this is a new one
    assert sorted(together(mpi, again)) == list(range(TOTAL))
    assert again != begun + rest
    run(0, 1)
    iterator.take_place()
    run(0, 1)  # ranks have died before its first step
    assert iterator.sampler.epoch == 21
    iterator.load_state_dict(iterator.state_dict() | {"position": 6})
    with pytest.raises(ValueError, match="after 6 samples of epoch 1 is in another order"):
        iter(iterator)  # of a checkpoint: drawn, and compared
    assert iterator.sampler.epoch == 28


class Raising(Epochs):
    def __iter__(self):
        raise OSError("no weights")


@pytest.mark.mpi(min_size=2)
def test_what_differs_between_ranks_is_refused_on_all(mpi):
    last = mpi.size() - 1
    is_last = mpi.rank() == last
    part = [5, 4] if is_last else [4, 5]
    with pytest.raises(ValueError, match=rf"gives rank {last} other indices than rank 0; give all ranks the same"):
        iter(DatasetIterator(sources(), 3, sampler=part))
    sampler = (Raising if is_last else Epochs)(range(TOTAL))
    with pytest.raises(ValueError, match=rf"gives no order: rank {last}: no weights"):
        iter(DatasetIterator(sources(), 3, sampler=sampler))
    less = [Subset(each, range(len(each) - is_last)) for each in datasets()]
    with pytest.raises(ValueError, match=rf"DatasetIterators differ: number of samples is \[52, .*{TOTAL - 3}\]"):
        trained(AllReduceSGDEngine(), DatasetIterator(less, 3))
    swapped = datasets()[:: -1 if is_last else 1]
    with pytest.raises(ValueError, match=r"sizes of sources is \[\[29, 7, 16\], .*\[16, 7, 29\]\]"):
        trained(AllReduceSGDEngine(), DatasetIterator(swapped, 3))
    with pytest.raises(ValueError, match="seed is"):
        trained(AllReduceSGDEngine(), DatasetIterator(sources(), 3, seed=mpi.rank()))


def test_indices_out_of_range_are_refused_on_all_ranks(mpi):
    for index in (TOTAL, -1):
        with pytest.raises(ValueError, match=rf"index {index} is none of a dataset of {TOTAL} samples"):
            iter(DatasetIterator(sources(), 3, sampler=[0, index]))


@pytest.mark.parametrize("options", [{"prefetch": 2}, {"prefetch": 0}, {"num_workers": 1}])
def test_a_source_that_raises_is_named(mpi, options):
    parts = [datasets()[0], Source(Numbers(29, 7, fail_at=5), **options)]
    iterator = DatasetIterator(parts, 4, shuffle=False, rank=0, size=1)
    seen = []
    with pytest.raises(
        RuntimeError, match=r"(?s)source 1 \(Numbers\) cannot be read: LookupError: .*no number 5"
    ) as caught:
        seen.extend(number for batch in iterator for number in numbers_of(iterator, batch))
    assert seen == list(range(32))
    assert isinstance(caught.value.__cause__, LookupError)
    assert "torchmpi_py prefetch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_early_ends_all_threads(mpi, num_workers):
    iterator = DatasetIterator(sources(num_workers), 2)
    for _ in iterator:
        break
    assert "torchmpi_py prefetch" not in [thread.name for thread in threading.enumerate()]
    assert sorted(epoch_of(mpi, iterator)) == list(range(TOTAL))


def test_nonsense_is_refused(mpi):
    with pytest.raises(ValueError, match=r"source 1 \(TensorDataset\) is empty"):
        DatasetIterator([datasets()[0], TensorDataset(torch.zeros(0, 1))], 2)
    with pytest.raises(ValueError, match="the sampler is empty"):
        DatasetIterator(sources(), 2, sampler=[])
    with pytest.raises(TypeError, match="generator, which lacks a length"):
        DatasetIterator(sources(), 2, sampler=(index for index in range(3)))
    with pytest.raises(TypeError, match="dataset is a set"):
        Source({1, 2})
    for name in ("prefetch", "num_workers"):
        with pytest.raises(ValueError, match=f"{name}=-1 must be at least 0"):
            Source(datasets()[0], **{name: -1})
    assert [len(batch) for batch in DatasetIterator([3, 4, 5], 4, rank=0, size=1)] == [3]  # a list of samples


def test_another_sampler_does_not_go_on_with_a_checkpoint(mpi, folder):
    """One that draws from what no checkpoint knows."""

    class Unknown(Epochs):
        calls = 0

        def __iter__(self):
            Unknown.calls += 1
            self.epoch = Unknown.calls
            return super().__iter__()

    def run(killed_at=None):
        def on_update(state):
            if state.t == killed_at:
                raise Killed

        resume.completed.clear()
        engine = AllReduceSGDEngine()
        engine.hooks.on_update = on_update
        trained(engine, DatasetIterator(sources(), 2, sampler=Unknown(range(TOTAL))), checkpoint=folder, every=1)

    with pytest.raises(Killed):
        run(killed_at=3)
    assert Checkpoints(folder).load() is not None
    with pytest.raises((ValueError, errors.CheckpointError), match="is in another order than this"):
        run()
