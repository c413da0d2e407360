"""Whether the ranks' DataLoaders have one dataset, which the engine divides, or each rank one of its own."""

import logging
import random
import sqlite3
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, get_worker_info

from torchmpi_py.engine import AllReduceSGDEngine, loaders

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:unclosed database"),
]
TOTAL = 23
EQUAL = "their attributes are equal: they are divided as one"


class Numbers(Dataset):
    """Samples (3 inputs, ``first + index``)."""

    def __init__(self, first=0, total=TOTAL):
        self.first, self.total = first, total

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        return self.input(index), torch.tensor([float(self.first + index)])

    def input(self, index):
        return torch.tensor([index % 5, index % 3, 1.0])


class Database(Numbers):
    """What it holds is behind a connection, which has no length."""

    def __init__(self, first):
        super().__init__()
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table numbers (place integer, number integer)")
        self.connection.executemany("insert into numbers values (?, ?)", [(i, first + i) for i in range(TOTAL)])

    def __getitem__(self, index):
        row = self.connection.execute("select number from numbers where place = ?", (index,)).fetchone()
        return self.input(index), torch.tensor([float(row[0])])


class WithRank(Numbers):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank


class Augmented(Numbers):
    """It draws from the global generators."""

    def input(self, index):
        return super().input(index) + torch.tensor([torch.rand(1).item(), np.random.rand(), random.random()])


class OwnGenerator(Numbers):
    def __init__(self, seed, first=0):
        super().__init__(first)
        self.generator = np.random.default_rng(seed)

    def input(self, index):
        return super().input(index) + float(self.generator.random())


class Opened(Numbers):
    """It is opened where it is read; ``opening`` has to be done by then, where there is a worker."""

    file = opening = None

    def __getitem__(self, index):
        assert get_worker_info() is None or self.opening
        self.file = threading.Lock()  # cannot be pickled, and should not go along with a fork
        return super().__getitem__(index)


class Unreadable(Numbers):
    """It cannot be read at first."""

    def __init__(self, is_closed):
        super().__init__()
        self.closed = iter(["closed"] * is_closed)  # no attribute that counts

    def __getitem__(self, index):
        if list(self.closed):
            raise LookupError(f"no sample {index}")
        return super().__getitem__(index)


class Functions(Numbers):
    def __getitem__(self, index):
        return lambda: super(Functions, self).__getitem__(index)


@pytest.fixture
def warnings(caplog):
    loaders._warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "torchmpi_py.loaders")
    return lambda: [record.getMessage() for record in caplog.records if "the datasets of the" in record.getMessage()]


def used(mpi, loader):
    """The numbers that each rank has used in an epoch; a stand-in is none."""
    numbers = []
    engine = AllReduceSGDEngine()
    engine.hooks.on_sample = lambda state: numbers.extend(state.sample[1][: state.num_samples, 0].int().tolist())
    network = torch.nn.Linear(3, 1)
    engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=loader, lr=1e-4)
    return mpi.allgather_object(numbers)


def is_divided(parts):
    return sorted(number for part in parts for number in part) == list(range(TOTAL))


def said_on_rank_0(mpi, messages, text):
    assert [text in message for message in messages] == [True] * (mpi.rank() == 0)


def test_other_data_behind_a_connection_are_kept(mpi, warnings):
    is_last = mpi.rank() == mpi.size() - 1
    parts = used(mpi, DataLoader(Database(1000 * is_last), 4, shuffle=True))
    assert [sorted(part) for part in parts[:-1]] == [list(range(TOTAL))] * (mpi.size() - 1)
    assert sorted(parts[-1]) == list(range(1000, 1000 + TOTAL))
    said_on_rank_0(mpi, warnings(), "have equal attributes but different samples: each rank keeps its own. To choose")


def test_data_that_are_equal_but_for_a_sample_in_the_middle_differ(mpi, warnings):
    database = Database(0)
    place = (TOTAL - 1) * 3 // 7
    database.connection.execute("update numbers set number = ? where place = ?", (100 + mpi.rank(), place))
    parts = used(mpi, DataLoader(database, 4))
    assert [len(part) for part in parts] == [TOTAL] * mpi.size()


WORKERS = {"main": {}, "fork": {"num_workers": 2, "multiprocessing_context": "fork"}}


def seed_by_rank(worker):
    dataset = get_worker_info().dataset
    dataset.opening = True
    np.random.seed(dataset.rank)
    random.seed(dataset.rank)
    torch.manual_seed(dataset.rank)


@pytest.mark.parametrize("where", ["main", "fork"])
@pytest.mark.parametrize("kind", [Database, WithRank, Augmented, Opened])
def test_one_dataset_is_divided(mpi, warnings, kind, where):
    dataset = kind(mpi.rank()) if kind is WithRank else kind(0)
    dataset.rank = mpi.rank()
    torch.manual_seed(mpi.rank())
    assert is_divided(used(mpi, DataLoader(dataset, 4, shuffle=True, worker_init_fn=seed_by_rank, **WORKERS[where])))
    assert not warnings()
    assert where == "main" or getattr(dataset, "file", None) is None  # nothing was opened before the fork


@pytest.mark.parametrize("where", ["main", "fork"])
def test_samples_that_change_leave_it_to_the_attributes(mpi, warnings, where):
    loader = DataLoader(OwnGenerator(mpi.rank()), 4, shuffle=True, **WORKERS[where])
    assert is_divided(used(mpi, loader))
    said_on_rank_0(mpi, warnings(), f"(they change from one reading to the next); {EQUAL}")
    own = DataLoader(OwnGenerator(mpi.rank(), 100 * mpi.rank()), 4)
    assert used(mpi, own) == [[100 * rank + index for index in range(TOTAL)] for rank in range(mpi.size())]
    assert len(warnings()) == 2 * (mpi.rank() == 0)
    assert mpi.rank() > 0 or "their attributes differ: each rank keeps its own" in warnings()[1]


def numbers_of(functions):
    return torch.utils.data.default_collate([function() for function in functions])


def test_samples_that_cannot_be_compared_leave_it_to_the_attributes(mpi, warnings):
    is_last = mpi.rank() == mpi.size() - 1
    assert is_divided(used(mpi, DataLoader(Unreadable(is_last), 4, shuffle=True)))
    said_on_rank_0(mpi, warnings(), f"(rank {mpi.size() - 1}: LookupError: no sample 0); {EQUAL}")
    assert is_divided(used(mpi, DataLoader(Functions(), 4, collate_fn=numbers_of)))
    assert len(warnings()) == 2 * (mpi.rank() == 0)
    assert mpi.rank() > 0 or "cannot be compared by samples (rank 0: " in warnings()[1]


def test_another_length_is_another_dataset(mpi, warnings):
    loader = DataLoader(Numbers(total=TOTAL - 4 * (mpi.rank() == 0)), 1000)
    assert [len(part) for part in used(mpi, loader)] == [TOTAL - 4] + [TOTAL] * (mpi.size() - 1)
    assert not warnings()


def test_the_remedies(mpi, warnings):
    dataset = OwnGenerator(mpi.rank())
    parts = used(mpi, DataLoader(dataset, 4, sampler=SubsetRandomSampler(range(TOTAL))))
    assert [sorted(part) for part in parts] == [list(range(TOTAL))] * mpi.size()
    parts = used(mpi, DataLoader(dataset, 4, sampler=mpi.shard(dataset)))
    assert {len(part) for part in parts} == {-(-TOTAL // mpi.size())}
    assert {number for part in parts for number in part} == set(range(TOTAL))
    assert not warnings()


def test_the_comparison_draws_nothing(mpi):
    def drawn():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    def seed():
        torch.manual_seed(mpi.rank())
        np.random.seed(mpi.rank())
        random.seed(mpi.rank())

    seed()
    expected = drawn()
    for dataset in (Augmented(), OwnGenerator(mpi.rank())):
        seed()
        loaders.divided(DataLoader(dataset, 4))
        assert drawn() == expected
