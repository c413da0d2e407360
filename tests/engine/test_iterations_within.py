"""Iterations within others, on the same iterator; places that are set; programs with threads and workers."""

import copy
import pickle

import pytest
import torch
from runs import numbered, numbers_in, together, train
from support import jobs
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, Shards, Source, StreamIterator
from torchmpi_py.engine.loaders import DividedLoader

TOTAL = 32
NUMBERS = list(range(TOTAL))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(NUMBERS)


def source(**options):
    return Source(NUMBERS, **options)


def loader(**options):
    return DividedLoader(DataLoader(NUMBERS, 4, **options), shuffle=True, seed=1)


MAKERS = {
    "dataset": lambda: DatasetIterator(NUMBERS, 4),
    "sampler": lambda: DatasetIterator(NUMBERS, 4, sampler=SequentialSampler(NUMBERS)),
    "sources": lambda: DatasetIterator([source(), source()], 4),
    "stream": lambda: StreamIterator(Stream(), 4),
    "shards": lambda: StreamIterator(Shards([0, 1, 2, 3], lambda file: iter(range(8 * file, 8 * file + 8))), 4),
    "loader": lambda: loader(),
    "workers": lambda: loader(num_workers=1),
}


def everything(iterator):
    return [number for batch in iterator for number in batch.tolist()]


def place(iterator):
    state = {name: each.tolist() if torch.is_tensor(each) else each for name, each in iterator.state_dict().items()}
    return state, iterator.position, iterator.weight, iterator.num_samples


@pytest.mark.parametrize("kind", MAKERS)
def test_an_iteration_within_another(kind):
    """It leaves the outer one's place, from which another iterator can go on."""
    iterator, used, rest = MAKERS[kind](), [], []
    total = sum(len(batch) for batch in MAKERS[kind]())
    iterator.set_epoch(0)
    for number, batch in enumerate(iterator):
        used += batch.tolist()
        before = place(iterator)
        if number == 2:
            assert len(everything(iterator)) == total
        elif number == 3:
            assert len(next(iter(iterator))) == 4
            iter(iterator)
            state = iterator.state_dict()
        elif number > 3:
            rest += batch.tolist()
        assert place(iterator) == before
    assert len(used) == total
    assert set(used) == set(NUMBERS)
    again = MAKERS[kind]()
    again.load_state_dict(state)
    assert everything(again) == rest


def test_the_place_that_was_set_counts():
    iterator = DatasetIterator(NUMBERS[:16], 4, seed=1)
    for _ in iterator:
        break
    begun = iterator.state_dict()
    assert (begun["epoch"], begun["position"]) == (0, 4)
    everything(iterator)
    assert iterator.state_dict() == begun | {"epoch": 2, "position": 0}
    iterator.set_epoch(5)
    assert iterator.state_dict() == begun | {"epoch": 5, "position": 0}
    iterator.load_state_dict(begun)
    assert iterator.state_dict() == begun
    other = DatasetIterator(NUMBERS[:16], 4, seed=1)
    other.load_state_dict(iterator.state_dict())
    assert len(everything(other)) == 12


def test_iterators_are_copied_and_pickled():
    for iterator in (DatasetIterator([source(num_workers=1)], 4), loader()):
        for other in (copy.deepcopy(iterator), pickle.loads(pickle.dumps(iterator))):
            assert sorted(everything(other)) == NUMBERS


@pytest.mark.mpi(min_size=2)
def test_a_hook_that_tests_on_the_training_data(mpi):
    inner, used = AllReduceSGDEngine(), []

    def test_within(state):
        used.extend(numbers_in(state.sample, state.num_samples))
        before = state.iterator.state_dict()
        options = {"criterion": state.criterion, "iterator": state.iterator}
        if state.t % 3 == 1:
            inner.test(network=state.network, **options)
        elif state.t % 3 == 2:
            inner.train(network=torch.nn.Linear(3, 1), lr=1e-5, maxepoch=1, extensions=[], **options)
        assert state.iterator.state_dict() == before

    def check(state):
        assert sorted(together(mpi, used)) == NUMBERS
        used.clear()

    iterator = DataLoader(numbered(TOTAL), 2, shuffle=True)
    train(torch.nn.Linear(3, 1), iterator, lr=1e-5, maxepoch=3, on_update=test_within, on_end_epoch=check)


UNFINISHED = """
import torch
from torchmpi_py.engine import DatasetIterator, Shards, Source, StreamIterator

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        image = torch.full((1, 3, 256, 256), float(index))
        return torch.nn.functional.interpolate(image, size=(224, 224), mode="bilinear")[0]

def read(file):
    yield from (Images()[index] for index in range(1000))

iterators = [
    iter(DatasetIterator(Images(), 16)),
    iter(DatasetIterator([Source(Images()), Source(Images())], 16)),
    iter(StreamIterator(Shards([0], read), 16)),
]
for iterator in iterators:
    next(iterator), next(iterator)
"""


def test_a_program_that_ends_within_an_epoch():
    job = jobs.python(UNFINISHED)
    assert (job.returncode, job.stderr) == (0, "")


WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset

import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine


class Points(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None, "not in a worker"
        return torch.full((2,), float(index)), index % 3


if __name__ == "__main__":
    mpi.start()
    workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(Points(), 4, shuffle=True, **workers)  # the engine divides it
    engine, seen, network = AllReduceSGDEngine(), [], torch.nn.Linear(2, 3)
    engine.hooks.on_sample = lambda state: seen.extend(state.sample[0][:, 0].tolist())
    options = {"criterion": torch.nn.CrossEntropyLoss(), "lr": 1e-3, "maxepoch": 2}
    state = engine.train(network=network, iterator=loader, **options)
    assert state.t == 6, state.t
    mpi.nn.check_with_allreduce(network)
    indices = sorted(mpi.allgather(torch.tensor(seen)).int().tolist())
    assert indices == sorted(2 * list(range(24))), indices
    mpi.stop()
"""


@pytest.mark.slow
@jobs.needs_mpi
def test_workers_serve_two_ranks(tmp_path):
    """Those that are forked are in ``test_loader_datasets``."""
    job = jobs.torchmpirun("-n", 2, "--timeout", 150, jobs.write(tmp_path, WORKERS))
    assert job.returncode == 0, job.stdout + job.stderr
