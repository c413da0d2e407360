"""DataLoaders without a sampler for ranks: the engine divides them, or it shows that nobody has."""

import logging

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from torchmpi_py import errors, nn
from torchmpi_py.engine import AllReduceSGDEngine, Average, DatasetIterator, SGDEngine, loaders, resume
from torchmpi_py.nn import first_batches

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
mean_square = torch.nn.MSELoss()


def data(total):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(total, 3, generator=generator), torch.arange(float(total)).unsqueeze(1))


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def train(engine, iterator, lr=0.0, **options):
    net = network()
    engine.train(network=net, criterion=mean_square, iterator=iterator, lr=lr, **options)
    return net


def used(mpi, iterator, **options):
    """The samples of all ranks in each epoch; a stand-in is none."""
    epochs = []
    engine = AllReduceSGDEngine()
    engine.hooks.on_start_epoch = lambda state: epochs.append([])
    engine.hooks.on_sample = lambda state: epochs[-1].extend(state.sample[1][: state.num_samples, 0].int().tolist())
    train(engine, iterator, **options)
    return [[index for part in mpi.allgather_object(epoch) for index in part] for epoch in epochs]


class Derived(DataLoader):
    """As those of libraries that collate in their own way."""


@pytest.fixture
def warnings(caplog):
    """What is logged, as if no warning had been given yet."""
    first_batches.warn_once.cache_clear()
    loaders._warn_of_kind.cache_clear()
    caplog.set_level(logging.INFO, "torchmpi_py")
    return caplog


@pytest.mark.parametrize("kind", [DataLoader, Derived])
@pytest.mark.parametrize("total", [1, 12, 61])
def test_each_sample_is_used_once_in_an_epoch(mpi, total, kind, warnings):
    epochs = used(mpi, kind(data(total), 4, shuffle=True), maxepoch=2)
    assert [sorted(epoch) for epoch in epochs] == [list(range(total))] * 2
    assert total == 1 or epochs[0] != epochs[1]
    assert used(mpi, DataLoader(data(total), 4)) == [
        [index for rank in range(mpi.size()) for index in alone(total, rank, mpi.size())]
    ]
    assert not warnings.records


def test_a_loader_that_iterates_in_its_own_way_is_not_divided(mpi, warnings):
    epochs = used(mpi, MyLoader(data(12), 4, shuffle=True, generator=torch.Generator().manual_seed(mpi.rank())))
    assert [sorted(epoch) for epoch in epochs] == [sorted(list(range(12)) * mpi.size())]
    is_said = "a MyLoader iterates in its own way, and is not divided" in warnings.text
    assert is_said == (mpi.rank() == 0 and mpi.size() > 1)


def alone(total, rank, size):
    """The samples of a rank in the order of the dataset, as a DatasetIterator gives them."""
    iterator = DatasetIterator(data(total), 4, shuffle=False, rank=rank, size=size)
    return [int(x) for _, target in iterator for x in target[: iterator.num_samples, 0]]


def test_the_last_batch_is_dropped_where_it_is_asked_for(mpi):
    epochs = used(mpi, DataLoader(data(9 * mpi.size() + mpi.size() // 2), 4, shuffle=True, drop_last=True))
    assert len(epochs[0]) == len(set(epochs[0])) == 8 * mpi.size()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_is_that_of_one_rank(mpi, asynchronous):
    net = train(AllReduceSGDEngine(asynchronous=asynchronous), DataLoader(data(27), 4, shuffle=True), 0.01, maxepoch=3)
    if mpi.size() > 1:  # one rank keeps torch's own order
        one = train(SGDEngine(), DatasetIterator(data(27), 4 * mpi.size(), rank=0, size=1), 0.01, maxepoch=3)
        torch.testing.assert_close(net.state_dict(), one.state_dict())


def test_a_test_counts_each_sample_once(mpi):
    dataset, net, loss = data(4 * mpi.size() + 3), network(), Average()
    engine = AllReduceSGDEngine()
    engine.hooks.on_forward_criterion = lambda state: loss.add(state.loss, state.num_samples)
    engine.test(network=net, criterion=mean_square, iterator=DataLoader(dataset, 4))
    assert loss.reduced() == pytest.approx(mean_square(net(dataset.tensors[0]), dataset.tensors[1]).item())
    assert loss.num_samples < len(dataset) or mpi.size() == 1


def doubled(samples):
    return tuple(2 * torch.stack(column) for column in zip(*samples, strict=True))


def test_what_else_the_loader_was_given_is_kept(mpi):
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return doubled(samples)

    epochs = used(mpi, DataLoader(data(4 * mpi.size()), 4, collate_fn=collate))
    assert sorted(epochs[0]) == list(range(0, 8 * mpi.size(), 2))
    assert seen == [4]
    given = {
        "num_workers": 1,
        "timeout": 7.0,
        "worker_init_fn": doubled,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "multiprocessing_context": "spawn",
        "pin_memory": True,
        "collate_fn": doubled,
    }
    loader = DataLoader(data(9), 4, **given)
    kept = loaders.DividedLoader(loader, shuffle=True, seed=0).loader
    assert all(getattr(kept, name) == getattr(loader, name) for name in given)


@pytest.mark.mpi(min_size=2)
def test_the_order_follows_the_seed_of_rank_0s_generator(mpi):
    def of(seed):
        loader = DataLoader(data(40), 4, shuffle=True, generator=torch.Generator().manual_seed(seed))
        return used(mpi, loader)[0]

    assert of(5 + mpi.rank()) == of(5) != of(6)
    assert sorted(of(5 + mpi.rank())) == list(range(40))
    assert of(0) == used(mpi, DataLoader(data(40), 4, shuffle=True))[0]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(3), torch.tensor([float(index)])) for index in range(8)])


class MyBatches(BatchSampler):
    pass


class MyLoader(DataLoader):
    def __iter__(self):
        return iter(list(super().__iter__()))


LEFT = {
    "DistributedSampler": lambda size, rank: DataLoader(data(8), 4, sampler=DistributedSampler(data(8), 1, 0)),
    "batch_sampler": lambda size, rank: DataLoader(
        data(8), batch_sampler=MyBatches(SequentialSampler(data(8)), 4, False)
    ),
    "with replacement": lambda size, rank: DataLoader(data(8), 4, sampler=RandomSampler(data(8), replacement=True)),
    "a number of samples": lambda size, rank: DataLoader(data(9), 4, sampler=RandomSampler(data(9), num_samples=8)),
    "of other data": lambda size, rank: DataLoader(data(9), 4, sampler=SequentialSampler(range(8))),
    "indices": lambda size, rank: DataLoader(data(8), 4, sampler=list(range(8))),
    "IterableDataset": lambda size, rank: DataLoader(Stream(), 4),
    "a subclass": lambda size, rank: MyLoader(data(8), 4),
    "a dataset of each rank": lambda size, rank: DataLoader(
        Subset(data(8 * size), range(rank, 8 * size, size)), 4, shuffle=True
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", LEFT)
def test_what_may_be_divided_already_is_left_as_it_is(mpi, kind):
    loader = LEFT[kind](mpi.size(), mpi.rank())
    states = []
    engine = AllReduceSGDEngine()
    engine.hooks.on_sample = states.append
    train(engine, loader)
    assert [state.iterator for state in states] == [loader, loader]
    if kind == "a dataset of each rank":
        assert sorted(used(mpi, loader)[0]) == list(range(8 * mpi.size()))


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_divided_is_refused_on_all_ranks(mpi):
    with pytest.raises(ValueError, match=r"batch_size=None .* sampler=mpi\.shard\(dataset\)"):
        train(AllReduceSGDEngine(), DataLoader(data(8), batch_size=None))
    last = mpi.size() - 1
    sizes = [4] * last + [5]
    with pytest.raises(ValueError, match=rf"batch_size is \[{', '.join(map(str, sizes))}\]"):
        train(AllReduceSGDEngine(), DataLoader(data(8), sizes[mpi.rank()]))
    with pytest.raises(ValueError, match="shuffle is"):
        AllReduceSGDEngine().test(
            network=network(), criterion=mean_square, iterator=DataLoader(data(8), 4, shuffle=mpi.rank() == last)
        )


class Killed(Exception):
    """Stands for a kill, in between steps, on all ranks."""


def test_it_goes_on_in_the_middle_of_an_epoch(mpi, tmp_path):
    folder = mpi.broadcast_object(tmp_path)

    def run(killed_at=None, **options):
        def on_update(state):
            if state.t == killed_at:
                raise Killed

        resume.completed.clear()
        torch.manual_seed(mpi.rank())
        engine, net = AllReduceSGDEngine(), torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5))
        net.append(torch.nn.Linear(8, 1))
        engine.hooks.on_update = on_update
        loader = DataLoader(data(8 * mpi.size() + 1), 2, shuffle=True)
        try:
            engine.train(network=net, criterion=mean_square, iterator=loader, lr=0.001, maxepoch=2, **options)
        except Killed:
            return None
        return torch.cat([*(p.detach().flatten() for p in net.parameters()), torch.rand(1)])

    expected = run()
    for killed_at in (2, 7):
        assert run(killed_at, checkpoint=folder, every=1) is None
    assert torch.equal(run(checkpoint=folder, every=1), expected)


@pytest.mark.parametrize("total", [1, 12, 61])
@pytest.mark.parametrize("shuffle", [False, True])
def test_shard(mpi, total, shuffle):
    sampler = mpi.shard(data(total), shuffle=shuffle, seed=3)
    loader = DataLoader(data(total), 4, sampler=sampler)
    epochs = [[int(x) for _, target in loader for x in target[:, 0]] for _ in range(3)]
    assert {len(epoch) for epoch in epochs} == {-(-total // mpi.size())} == {len(sampler)}
    for epoch in epochs:
        everything = mpi.allgather(torch.tensor(epoch)).tolist()
        assert set(everything) == set(range(total))
        assert len(everything) - total < mpi.size()
    if total == 61:
        assert (epochs[0] == epochs[1]) == (not shuffle)
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]
    assert list(sampler) == epochs[1]
    other = mpi.shard(data(61), seed=4)
    assert list(other) != list(mpi.shard(data(61), seed=3))


def test_shard_in_the_engine_follows_its_epochs(mpi):
    epochs = used(mpi, DataLoader(data(6 * mpi.size()), 4, sampler=mpi.shard(data(6 * mpi.size()))), maxepoch=2)
    assert [sorted(epoch) for epoch in epochs] == [list(range(6 * mpi.size()))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", ["shard", "DistributedSampler"])
def test_a_sampler_inside_a_batch_sampler_follows_the_epochs(mpi, kind):
    dataset = data(6 * mpi.size())
    sampler = mpi.shard(dataset) if kind == "shard" else DistributedSampler(dataset, mpi.size(), mpi.rank())
    loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False))
    epochs = used(mpi, loader, maxepoch=2)
    assert [sorted(epoch) for epoch in epochs] == [list(range(6 * mpi.size()))] * 2
    assert epochs[0] != epochs[1]
    assert used(mpi, loader, maxepoch=2) == epochs  # each call counts from epoch 0


def test_shard_refuses_what_it_cannot_divide(mpi, monkeypatch):
    with pytest.raises(TypeError, match="Stream without a length"):
        mpi.shard(Stream())
    with pytest.raises(ValueError, match="empty"):
        mpi.shard([])
    with monkeypatch.context() as patch:
        patch.setattr("torchmpi_py.core.communicators.current_stack", None)
        with pytest.raises(errors.NotStarted):
            mpi.shard([1])


class Sampler(torch.utils.data.Sampler):
    """One of the user's, which knows nothing of ranks; ``first`` is where this rank begins."""

    def __init__(self, total, first=0):
        self.total, self.first = total, first

    def __iter__(self):
        return iter([(self.first + index) % self.total for index in range(self.total)])

    def __len__(self):
        return self.total


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_train_on_the_same_batches_are_told_once(mpi, asynchronous, warnings):
    def run(first):
        torch.manual_seed(mpi.rank())
        net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))  # gradients differ, batches do not
        engine = AllReduceSGDEngine(asynchronous=asynchronous)
        loader = DataLoader(data(24), 4, sampler=Sampler(24, first))
        engine.train(network=net, criterion=mean_square, iterator=loader, lr=0.01)

    run(mpi.rank())
    assert not warnings.records
    run(0 if mpi.rank() in (0, mpi.size() - 1) else mpi.rank())
    run(0)
    said = [record.getMessage() for record in warnings.records]
    everyone = ", ".join(map(str, range(mpi.size())))
    expected = [f"ranks 0, {mpi.size() - 1} of {mpi.size()} train"]
    expected += [f"ranks {everyone} of {mpi.size()} train"] if mpi.size() > 2 else []
    if mpi.rank() > 0:
        assert not said
        return
    assert [message[: len(start)] for message, start in zip(said, expected, strict=True)] == expected
    assert "sampler=mpi.shard(dataset)" in said[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loop_of_ones_own_is_told_too(mpi, asynchronous, warnings):
    def run(loader):
        net = network()
        registration = nn.register_async_backward(net) if asynchronous else None
        for x, y in loader:
            net.zero_grad()
            mean_square(net(x), y).backward()
            registration.synchronize() if asynchronous else nn.synchronize_gradients(net)
        if asynchronous:
            registration.remove()

    dataset = data(8 * mpi.size())
    run(DataLoader(dataset, 2, sampler=mpi.shard(dataset)))
    zeros = TensorDataset(torch.zeros(8, 3), torch.zeros(8, 1))
    run(DataLoader(TensorDataset(zeros.tensors[0], network().bias.detach().expand(8, 1)), 2))  # no gradient at all
    assert not warnings.records
    torch.manual_seed(0)
    run(DataLoader(dataset, 2, shuffle=True))
    assert len(warnings.records) == (mpi.rank() == 0)
    assert all("train on the same batches" in record.getMessage() for record in warnings.records)
