"""Whether the ranks' DataLoaders have one dataset, which the engine divides; else an error asks for a sampler."""

import sqlite3

import pytest
import torch
from runs import numbered, numbers_in, train
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]
TOTAL = 23


class Numbers(Dataset):
    """Samples (3 inputs, index)."""

    def __init__(self, total=TOTAL, tag=""):
        self.total, self.tag = total, tag

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        return torch.tensor([index % 5, index % 3, 1.0]), torch.tensor([float(index)])


class Opened(Numbers):
    """A file is opened where it is read, which cannot be pickled, and should not go along with a fork."""

    file = None

    def __getitem__(self, index):
        self.file = self.file or sqlite3.connect(":memory:")
        return super().__getitem__(index)


class Cached(Numbers):
    """It keeps what it has read."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def __getitem__(self, index):
        return self.cache.setdefault(index, super().__getitem__(index))


def used(mpi, loader):
    """The numbers that each rank has used in an epoch."""
    numbers = []

    def on_sample(state):
        numbers.extend(numbers_in(state.sample, state.num_samples))

    train(torch.nn.Linear(3, 1), loader, lr=1e-4, on_sample=on_sample)
    return mpi.allgather_object(numbers)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Opened, Cached])
def test_one_dataset_is_divided(mpi, kind, num_workers):
    """Also when it has been read."""
    dataset = kind()
    for _ in range(2):
        parts = used(mpi, DataLoader(dataset, 4, shuffle=True, num_workers=num_workers))
        assert sorted(number for part in parts for number in part) == list(range(TOTAL))
    assert num_workers == 0 or getattr(dataset, "file", None) is None  # nothing was opened before the fork


def test_datasets_that_may_differ_are_refused_on_all_ranks(mpi):
    rank, size = mpi.rank(), mpi.size()
    doubtful = [Numbers(tag=rank), Numbers(TOTAL + rank), Subset(numbered(2 * size), [2 * rank, 2 * rank + 1])]
    doubtful.append(Numbers(tag=sqlite3.connect(":memory:") if rank == 0 else ""))
    for dataset in doubtful:
        with pytest.raises(ValueError, match=r"cannot be compared: .* sampler=mpi\.shard\(dataset\) to the DataLoader"):
            used(mpi, DataLoader(dataset, 4, shuffle=True))
    with pytest.raises(ValueError, match=r"Numbers of 23 samples on rank 0, not comparable \(TypeError: "):
        used(mpi, DataLoader(doubtful[-1], 4))
    parts = used(mpi, DataLoader(doubtful[0], 4, sampler=SubsetRandomSampler(range(TOTAL))))
    assert [sorted(part) for part in parts] == [list(range(TOTAL))] * size
    parts = used(mpi, DataLoader(doubtful[0], 4, sampler=mpi.shard(doubtful[0])))
    assert {number for part in parts for number in part} == set(range(TOTAL))
