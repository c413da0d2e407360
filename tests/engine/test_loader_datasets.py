"""Whether the ranks' DataLoaders have one dataset, which the engine divides, or each rank one of its own."""

import logging
import random
import sqlite3
import threading

import numpy as np
import pytest
import torch
from runs import numbers_in, train
from torch.utils.data import DataLoader, Dataset, get_worker_info

from torchmpi_py.engine import loaders

pytestmark = [
    pytest.mark.mpi(min_size=2),
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


@pytest.fixture
def warnings(caplog):
    loaders._warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "torchmpi_py.loaders")
    return lambda: [record.getMessage() for record in caplog.records if "the datasets of the" in record.getMessage()]


def used(mpi, loader):
    """The numbers that each rank has used in an epoch; a stand-in is none."""
    numbers = []

    def on_sample(state):
        numbers.extend(numbers_in(state.sample, state.num_samples))

    train(torch.nn.Linear(3, 1), loader, lr=1e-4, on_sample=on_sample)
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
    database = Database(0)  # one that differs by a sample in the middle
    place = (TOTAL - 1) * 3 // 7
    database.connection.execute("update numbers set number = ? where place = ?", (100 + mpi.rank(), place))
    assert [len(part) for part in used(mpi, DataLoader(database, 4))] == [TOTAL] * mpi.size()


WORKERS = {"main": {}, "fork": {"num_workers": 2, "multiprocessing_context": "fork"}}


def seed_by_rank(worker):
    dataset = get_worker_info().dataset
    dataset.opening = True
    np.random.seed(dataset.rank)
    random.seed(dataset.rank)
    torch.manual_seed(dataset.rank)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *((kind, "main") for kind in (Database, WithRank, Augmented)),
        *((kind, "fork") for kind in (WithRank, Opened)),
        *(pytest.param(kind, "fork", marks=pytest.mark.slow) for kind in (Database, Augmented)),
    ],
)
def test_one_dataset_is_divided(mpi, warnings, kind, where):
    dataset = kind(mpi.rank()) if kind is WithRank else kind(0)
    dataset.rank = mpi.rank()
    torch.manual_seed(mpi.rank())
    assert is_divided(used(mpi, DataLoader(dataset, 4, shuffle=True, worker_init_fn=seed_by_rank, **WORKERS[where])))
    assert not warnings()
    assert where == "main" or getattr(dataset, "file", None) is None  # nothing was opened before the fork


@pytest.mark.parametrize("where", ["main", pytest.param("fork", marks=pytest.mark.slow)])
def test_samples_that_change_leave_it_to_the_attributes(mpi, warnings, where):
    loader = DataLoader(OwnGenerator(mpi.rank()), 4, shuffle=True, **WORKERS[where])
    assert is_divided(used(mpi, loader))
    said_on_rank_0(mpi, warnings(), f"(they change from one reading to the next); {EQUAL}")
    own = DataLoader(OwnGenerator(mpi.rank(), 100 * mpi.rank()), 4)
    assert used(mpi, own) == [[100 * rank + index for index in range(TOTAL)] for rank in range(mpi.size())]
    assert len(warnings()) == 2 * (mpi.rank() == 0)
    assert mpi.rank() > 0 or "their attributes differ: each rank keeps its own" in warnings()[1]


def test_samples_that_cannot_be_compared_leave_it_to_the_attributes(mpi, warnings):
    is_last = mpi.rank() == mpi.size() - 1
    assert is_divided(used(mpi, DataLoader(Unreadable(is_last), 4, shuffle=True)))
    said_on_rank_0(mpi, warnings(), f"(rank {mpi.size() - 1}: LookupError: no sample 0); {EQUAL}")


def test_another_length_is_another_dataset(mpi, warnings):
    loader = DataLoader(Numbers(total=TOTAL - 4 * (mpi.rank() == 0)), 1000)
    assert [len(part) for part in used(mpi, loader)] == [TOTAL - 4] + [TOTAL] * (mpi.size() - 1)
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
