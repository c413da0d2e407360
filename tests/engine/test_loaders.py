"""DataLoaders without a sampler for ranks: the engine divides them, or it shows that nobody has."""

import logging

import pytest
import torch
from runs import loss_of, numbered, numbers_in, train, used
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from torchmpi_py import errors
from torchmpi_py.engine import AllReduceSGDEngine, Average, DatasetIterator, loaders

pytestmark = pytest.mark.mpi
both_ways = pytest.mark.parametrize("asynchronous", [False, True])


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


class Derived(DataLoader):
    """As those of libraries that collate in their own way."""


class MyLoader(DataLoader):
    def __iter__(self):
        return iter(list(super().__iter__()))


class MyBatches(BatchSampler):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(3), torch.tensor([float(index)])) for index in range(8)])


@pytest.fixture
def warnings(caplog):
    """What is logged, as if no warning had been given yet."""
    caplog.set_level(logging.INFO, "torchmpi_py")
    return caplog


def alone(total, rank, size):
    """The samples of a rank in the order of the dataset, as a DatasetIterator gives them."""
    iterator = DatasetIterator(numbered(total), 4, shuffle=False, rank=rank, size=size)
    return [number for batch in iterator for number in numbers_in(batch, iterator.num_samples)]


@pytest.mark.parametrize(("total", "kind"), [(1, DataLoader), (12, Derived), (61, DataLoader)])
def test_each_sample_is_used_once_in_an_epoch(mpi, total, kind, warnings):
    epochs = used(mpi, kind(numbered(total), 4, shuffle=True), maxepoch=2)
    assert [sorted(epoch) for epoch in epochs] == [list(range(total))] * 2
    assert total == 1 or epochs[0] != epochs[1]
    in_order = [index for rank in range(mpi.size()) for index in alone(total, rank, mpi.size())]
    assert used(mpi, kind(numbered(total), 4)) == [in_order]
    assert not warnings.records
    total = 9 * mpi.size() + mpi.size() // 2
    (epoch,) = used(mpi, kind(numbered(total), 4, shuffle=True, drop_last=True))
    assert len(epoch) == len(set(epoch)) == 8 * mpi.size()


def test_a_test_counts_each_sample_once(mpi):
    dataset, net, loss, engine = numbered(4 * mpi.size() + 3), network(), Average(), AllReduceSGDEngine()
    engine.hooks.on_forward_criterion = lambda state: loss.add(state.loss, state.num_samples)
    engine.test(network=net, criterion=loss_of, iterator=DataLoader(dataset, 4))
    assert loss.reduced() == pytest.approx(loss_of(net(dataset.tensors[0]), dataset.tensors[1]).item())
    assert loss.num_samples < len(dataset) or mpi.size() == 1


def doubled(samples):
    return tuple(2 * torch.stack(column) for column in zip(*samples, strict=True))


def test_what_else_the_loader_was_given_is_kept(mpi):
    (epoch,) = used(mpi, DataLoader(numbered(4 * mpi.size()), 4, collate_fn=doubled))
    assert sorted(epoch) == list(range(0, 8 * mpi.size(), 2))
    given = {"num_workers": 1, "timeout": 7.0, "worker_init_fn": doubled, "prefetch_factor": 5}
    given |= {"persistent_workers": True, "multiprocessing_context": "spawn", "pin_memory": True}
    loader = DataLoader(numbered(9), 4, **given)
    kept = loaders.DividedLoader(loader, shuffle=True, seed=0).options
    assert kept["persistent_workers"] is False  # they are started in each epoch
    assert all(kept[name] == getattr(loader, name) for name in given if name != "persistent_workers")


@pytest.mark.mpi(min_size=2)
def test_the_order_follows_the_seed_of_rank_0s_generator(mpi):
    def of(seed):
        return used(mpi, DataLoader(numbered(40), 4, shuffle=True, generator=torch.Generator().manual_seed(seed)))[0]

    assert of(5 + mpi.rank()) == of(5) != of(6)
    assert of(0) == used(mpi, DataLoader(numbered(40), 4, shuffle=True))[0]


def eight(**options):
    return DataLoader(numbered(8), **options)


LEFT = {
    "DistributedSampler": lambda: eight(batch_size=4, sampler=DistributedSampler(numbered(8), 1, 0)),
    "batch_sampler": lambda: eight(batch_sampler=MyBatches(SequentialSampler(numbered(8)), 4, False)),
    "with replacement": lambda: eight(batch_size=4, sampler=RandomSampler(numbered(8), replacement=True)),
    "a number of samples": lambda: eight(batch_size=4, sampler=RandomSampler(numbered(8), num_samples=7)),
    "of other data": lambda: DataLoader(numbered(9), 4, sampler=SequentialSampler(range(8))),
    "indices": lambda: eight(batch_size=4, sampler=list(range(8))),
    "IterableDataset": lambda: DataLoader(Stream(), 4),
}


@pytest.mark.mpi(min_size=2)
def test_what_may_be_divided_already_is_left_as_it_is(mpi):
    def iterators(loader):
        states = []
        train(network(), loader, on_sample=states.append, lr=0)
        return [state.iterator for state in states]

    for kind, make in LEFT.items():
        loader = make()
        assert iterators(loader) == [loader, loader], kind


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_divided_is_refused_on_all_ranks(mpi):
    for loader in (eight(batch_size=None), MyLoader(numbered(12), 4, shuffle=True)):
        with pytest.raises(ValueError, match=r"cannot be divided.* sampler=mpi\.shard\(dataset\)"):
            train(network(), loader)
    last = mpi.size() - 1
    sizes = [4] * last + [5]
    with pytest.raises(ValueError, match=rf"batch_size is \[{', '.join(map(str, sizes))}\]"):
        train(network(), eight(batch_size=sizes[mpi.rank()]))
    loader = eight(batch_size=4, shuffle=mpi.rank() == last)
    with pytest.raises(ValueError, match="shuffle is"):
        AllReduceSGDEngine().test(network=network(), criterion=loss_of, iterator=loader)


@pytest.mark.parametrize(("total", "shuffle"), [(1, True), (12, False), (61, False), (61, True)])
def test_shard(mpi, total, shuffle):
    sampler = mpi.shard(numbered(total), shuffle=shuffle, seed=3)
    epochs = [list(sampler) for _ in range(3)]
    assert {len(epoch) for epoch in epochs} == {-(-total // mpi.size())} == {len(sampler)}
    for epoch in epochs:
        everything = mpi.allgather(torch.tensor(epoch)).tolist()
        assert set(everything) == set(range(total))
        assert len(everything) - total < mpi.size()
    sampler.set_epoch(0)
    assert [list(sampler), list(sampler)] == epochs[:2]
    if total == 61:
        assert (epochs[0] == epochs[1]) == (not shuffle)
        assert not shuffle or list(mpi.shard(numbered(61), seed=4)) != epochs[0]


def test_shard_refuses_what_it_cannot_divide(mpi, monkeypatch):
    with pytest.raises(TypeError, match="Stream without a length"):
        mpi.shard(Stream())
    with pytest.raises(ValueError, match="empty"):
        mpi.shard([])
    monkeypatch.setattr("torchmpi_py.core.communicators.current_stack", None)
    with pytest.raises(errors.NotStarted):
        mpi.shard([1])


@pytest.mark.parametrize("kind", ["shard", "shard in batches", "DistributedSampler in batches"])
def test_a_sampler_follows_the_epochs_of_the_engine(mpi, kind):
    dataset = numbered(6 * mpi.size())
    sampler = mpi.shard(dataset) if "shard" in kind else DistributedSampler(dataset, mpi.size(), mpi.rank())
    is_inside = "batches" in kind
    loader = (
        DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False))
        if is_inside
        else DataLoader(dataset, 4, sampler=sampler)
    )
    epochs = used(mpi, loader, maxepoch=2)
    assert [sorted(epoch) for epoch in epochs] == [list(range(6 * mpi.size()))] * 2
    assert epochs[0] != epochs[1]
    assert used(mpi, loader, maxepoch=2) == epochs  # each call counts from epoch 0


class OwnSampler(Sampler):
    """One of the user's, which knows nothing of ranks; ``first`` is where this rank begins."""

    def __init__(self, total, first=0):
        self.total, self.first = total, first

    def __iter__(self):
        return iter([(self.first + index) % self.total for index in range(self.total)])

    def __len__(self):
        return self.total


@pytest.mark.mpi(min_size=2)
@both_ways
def test_a_warning_of_ranks_that_train_on_the_same_batches(mpi, asynchronous, warnings):
    def run(first):
        torch.manual_seed(mpi.rank())
        net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))  # gradients differ, batches do not
        loader = DataLoader(numbered(24), 4, sampler=OwnSampler(24, first))
        train(net, loader, engine=AllReduceSGDEngine(asynchronous=asynchronous), lr=0.01)

    run(mpi.rank())
    assert not warnings.records
    run(0 if mpi.rank() in (0, mpi.size() - 1) else mpi.rank())
    run(0)
    said = [record.getMessage() for record in warnings.records]
    everyone = ", ".join(map(str, range(mpi.size())))
    expected = [f"ranks {ranks} of {mpi.size()} train" for ranks in (f"0, {mpi.size() - 1}", everyone)]
    if mpi.rank() > 0:
        assert not said
        return
    assert [message[: len(start)] for message, start in zip(said, expected, strict=True)] == expected
    assert "sampler=mpi.shard(dataset)" in said[0]
