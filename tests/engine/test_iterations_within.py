"""An iteration that begins within another one, on the same iterator; places that are set; threads at the end."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, Shards, Source, StreamIterator
from torchmpi_py.engine.loaders import DividedLoader

TOTAL = 32


class Numbers(Dataset):
    def __len__(self):
        return TOTAL

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(TOTAL))


MAKERS = {
    "dataset": lambda: DatasetIterator(Numbers(), 4),
    "sampler": lambda: DatasetIterator(Numbers(), 4, sampler=SequentialSampler(Numbers())),
    "sources": lambda: DatasetIterator([Source(Numbers()), Source(Numbers())], 4),
    "stream": lambda: StreamIterator(Stream(), 4),
    "shards": lambda: StreamIterator(Shards([0, 1, 2, 3], lambda file: iter(range(8 * file, 8 * file + 8))), 4),
    "loader": lambda: DividedLoader(DataLoader(Numbers(), 4, shuffle=True), shuffle=True, seed=1),
    "workers": lambda: DividedLoader(DataLoader(Numbers(), 4, num_workers=1), shuffle=True, seed=1),
}


def everything(iterator):
    return [number for batch in iterator for number in batch.tolist()]


def facts(iterator):
    state = iterator.state_dict()
    return {name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in state.items()}, [
        getattr(iterator, name) for name in ("position", "weight", "num_samples")
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("within", ["peek", "whole", "both at once"])
@pytest.mark.parametrize("kind", MAKERS)
def test_an_iteration_within_another(kind, within):
    iterator, used = MAKERS[kind](), []
    total = sum(len(batch) for batch in MAKERS[kind]())
    other = iter(iterator) if within == "both at once" else None
    iterator.set_epoch(0)
    for number, batch in enumerate(iterator.as_outer(iter(iterator))):
        used += batch.tolist()
        before = facts(iterator)
        if within == "both at once":
            assert next(other) is not None
            continue  # the place is that of the latest
        if number == 3:
            inner = next(iter(iterator)).tolist() if within == "peek" else everything(iterator)
            assert len(inner) == (4 if within == "peek" else total)
        assert facts(iterator) == before
    assert len(used) == total
    assert set(used) == set(range(TOTAL))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_place_of_an_outer_iteration_is_good(kind):
    iterator = MAKERS[kind]()
    for number, batch in enumerate(iterator.as_outer(iter(iterator))):
        if number == 3:
            next(iter(iterator))
            iter(iterator)
            state, rest = iterator.state_dict(), []
        elif number > 3:
            rest += batch.tolist()
    again = MAKERS[kind]()
    again.load_state_dict(state)
    assert everything(again) == rest


def test_lasting_workers_are_taken_by_the_second_iteration():
    for iterator in (
        DatasetIterator([Source(Numbers(), num_workers=1)], 4),
        DividedLoader(DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True), shuffle=True, seed=1),
    ):
        outer = iter(iterator)
        next(outer)
        assert sorted(everything(iterator)) == list(range(TOTAL))
        with pytest.raises(RuntimeError, match="has taken the worker processes: make a"):
            list(outer)
        assert sorted(everything(iterator)) == list(range(TOTAL))


def test_the_place_that_was_set_counts():
    iterator = DatasetIterator(list(range(16)), 4, seed=1)
    for _ in iterator:
        break
    begun = iterator.state_dict()
    assert (begun["epoch"], begun["position"]) == (0, 4)
    iterator.set_epoch(5)
    assert iterator.state_dict() == {"epoch": 5, "position": 0, "order": None}
    iterator.load_state_dict({"epoch": 3, "position": 8, "order": None})
    assert iterator.state_dict() == {"epoch": 3, "position": 8, "order": None}
    everything(iterator)
    iterator.load_state_dict(begun)
    assert iterator.state_dict() == begun  # with the digest, though another order was drawn meanwhile
    other = DatasetIterator(list(range(16)), 4, seed=1)
    other.load_state_dict(iterator.state_dict())
    assert len(everything(other)) == 12


def test_an_iteration_that_is_kept_is_no_outer_one():
    iterator = DatasetIterator(list(range(16)), 4)
    kept = iter(iterator)
    next(kept)
    for epoch in range(1, 3):
        everything(iterator)
        assert iterator.state_dict() == {"epoch": epoch + 1, "position": 0, "order": None}


def test_iterators_are_copied_and_pickled():
    for iterator in (
        DatasetIterator([Source(Numbers(), num_workers=1)], 4),
        DividedLoader(DataLoader(Numbers(), 4), shuffle=True, seed=1),
    ):
        for other in (copy.deepcopy(iterator), pickle.loads(pickle.dumps(iterator))):
            assert sorted(everything(other)) == list(range(TOTAL))


@pytest.mark.mpi
def test_a_hook_that_tests_on_the_training_data(mpi):
    if mpi.size() == 1:
        pytest.skip("a DataLoader is not divided there")
    dataset = torch.utils.data.TensorDataset(torch.arange(float(TOTAL)).view(-1, 1), torch.zeros(TOTAL, 1))
    iterator = DataLoader(dataset, 2, shuffle=True)
    engine, inner, used = AllReduceSGDEngine(), AllReduceSGDEngine(), []
    engine.hooks.on_sample = lambda state: used.extend(state.sample[0].view(-1).tolist()[: state.num_samples])

    def test_within(state):
        place = state.iterator.state_dict()
        options = {"criterion": state.criterion, "iterator": state.iterator}
        if state.t % 3 == 1:
            inner.test(network=state.network, **options)
        elif state.t % 3 == 2:
            inner.train(network=torch.nn.Linear(1, 1), lr=1e-5, maxepoch=1, epoch_lines=False, **options)
        assert state.iterator.state_dict() == place

    def check(state):
        numbers = sorted(number for each in mpi.allgather_object(used) for number in each)
        assert numbers == list(range(TOTAL))
        used.clear()

    engine.hooks.on_update, engine.hooks.on_end_epoch = test_within, check
    engine.train(network=torch.nn.Linear(1, 1), criterion=torch.nn.MSELoss(), iterator=iterator, lr=1e-5, maxepoch=3)


PROGRAM = """
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

batches = iter({made})
for _ in range(3):
    next(batches)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "made",
    [
        "DatasetIterator(Images(), 16)",
        "DatasetIterator([Source(Images()), Source(Images()), Source(Images())], 16)",
        "StreamIterator(Shards([0], read), 16)",
    ],
)
def test_a_program_that_ends_within_an_epoch(made):
    job = subprocess.run([sys.executable, "-c", PROGRAM.format(made=made)], capture_output=True, text=True, timeout=80)
    assert (job.returncode, job.stderr) == (0, "")
