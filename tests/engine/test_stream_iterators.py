"""Streams divided over ranks and workers: every sample once, also where ranks have unequal numbers of them."""

import logging

import pytest
import torch
from runs import epoch_of, numbers_in, on_few, sample_of, together, trained
from torch.utils.data import IterableDataset

from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, SGDEngine, Shards, StreamIterator
from torchmpi_py.engine.streams import dealt, left
from torchmpi_py.errors import CheckpointError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]
SIZES = (11, 1, 0, 23, 6, 9, 2)  # samples of each file
TOTAL = sum(SIZES)


@pytest.fixture
def pattern(mpi, folder):
    """Of text files, each with so many samples."""
    if mpi.rank() == 0:
        numbers = iter(range(TOTAL))
        for file, size in enumerate(SIZES):
            (folder / f"data-{file}.txt").write_text("".join(f"{next(numbers)}\n" for _ in range(size)))
    mpi.barrier()
    return f"{folder}/data-*.txt"


def read(path):
    with open(path) as lines:
        yield from (sample_of(int(line)) for line in lines)


class Stream(IterableDataset):
    """All samples, wherever it is iterated."""

    def __init__(self, total=TOTAL):
        self.total = total

    def __iter__(self):
        return map(sample_of, range(self.total))


def stream(way, pattern):
    return Shards(pattern, read) if way == "files" else Stream()


ways_and_workers = pytest.mark.parametrize(
    ("way", "num_workers"),
    [("files", 0), ("iterable", 0), ("files", 2), pytest.param("iterable", 2, marks=pytest.mark.slow)],
)


@ways_and_workers
def test_every_sample_once_in_an_epoch(mpi, pattern, way, num_workers):
    """Each file is read by one reader alone. Ranks take the same steps, with weights of a mean."""
    iterator = StreamIterator(stream(way, pattern), 3, num_workers=num_workers, seed=4)
    mine, rows = [], []
    for batch in iterator:
        mine += numbers_in(batch, iterator.num_samples)
        rows.append((iterator.num_samples, iterator.weight, iterator.position))
    epochs = [together(mpi, mine), epoch_of(mpi, iterator)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(TOTAL))] * 2
    assert iterator.position == TOTAL
    assert (epochs[0] != epochs[1]) == (way == "files")
    starts = [sum(SIZES[:file]) for file in range(len(SIZES))]
    read = [len(set(mine) & set(range(start, start + size))) for start, size in zip(starts, SIZES, strict=True)]
    assert way != "files" or all(number in (0, size) for number, size in zip(read, SIZES, strict=True))
    position = 0
    for ranks in zip(*mpi.allgather_object(rows), strict=True):
        count = sum(row[0] for row in ranks)
        position += count
        assert {row[2] for row in ranks} == {position}
        assert [row[1] for row in ranks] == [row[0] * mpi.size() / count for row in ranks]


@ways_and_workers
def test_the_rest_of_an_epoch(mpi, pattern, way, num_workers):
    """On the same number of ranks, twice, with other workers; and on fewer ranks."""
    size = mpi.size()

    def some(iterator):
        batches = iter(iterator)
        mine = [n for _ in range(2) for n in numbers_in(next(batches), iterator.num_samples)]
        state = iterator.state_dict()
        batches.close()
        return together(mpi, mine), state

    def resumed(num_workers):
        iterator = StreamIterator(stream(way, pattern), 2, num_workers=num_workers, seed=2)
        iterator.load_state_dict(state)
        assert iterator.state_dict() == state or iterator.size != size
        return iterator

    begun, state = some(StreamIterator(stream(way, pattern), 3, num_workers=num_workers, seed=2))
    assert len(begun) == state["position"] > 0
    if mpi.size() > 1:
        assert sorted(begun + on_few(mpi, lambda: epoch_of(mpi, resumed(num_workers)))) == list(range(TOTAL))
    if len(begun) < TOTAL // 2:
        more, state = some(resumed(2 - num_workers))
        begun += more
    last = resumed(num_workers)
    assert sorted(begun + epoch_of(mpi, last)) == list(range(TOTAL))
    assert sorted(epoch_of(mpi, last)) == list(range(TOTAL))  # the next epoch is whole


@pytest.mark.parametrize("num_readers", [1, 2, 3, 5, 7, 11])
def test_what_is_left_is_what_was_not_read(num_readers):
    """Pure arithmetic: readers that stop anywhere, whose rests are dealt to others, which stop as well."""
    generator = torch.Generator().manual_seed(num_readers)

    def drawn(below):
        return int(torch.randint(below, (), generator=generator))

    for _ in range(30):
        rests, seen = [(piece, 0) for piece in range(len(SIZES))], []
        for readers in (num_readers, 1 + drawn(9), 1 + drawn(9), 1):
            reached, is_last = [], readers == 1
            for reader in range(readers):
                place, stop = (0, 0), TOTAL if is_last else drawn(TOTAL)
                for number, (piece, used) in enumerate(dealt(rests, reader, readers)):
                    for at in range(used, SIZES[piece]):
                        if stop:
                            stop, place = stop - 1, (number, at + 1)
                            seen.append((piece, at))
                reached.append(place)
            rests = left(rests, reached)
            if is_last:
                break
        assert len(seen) == len(set(seen))
        remaining = {(piece, at) for piece, used in rests for at in range(used, SIZES[piece])}
        assert sorted(seen + list(remaining)) == [(p, at) for p, size in enumerate(SIZES) for at in range(size)]


@pytest.mark.parametrize(
    ("way", "num_workers", "engine"),
    [
        *(("files", 0, {name: True}) for name in ("debug", "asynchronous", "sharded")),
        pytest.param("iterable", 2, {"asynchronous": True}, marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_one_process_on_the_same_global_batches(mpi, pattern, way, num_workers, engine):
    """Also in the steps in which a rank has run out."""
    batches = []

    def on_backward(state):
        batches.append([column.tolist() for column in state.sample or [torch.empty(0)] * 2])

    iterator = StreamIterator(stream(way, pattern), 3, num_workers=num_workers)
    mine = trained(iterator, engine=AllReduceSGDEngine(**engine), on_backward=on_backward)
    assert way == "iterable" or mpi.size() == 1 or [] in [batch[0] for batch in together(mpi, batches)]
    steps = zip(*mpi.allgather_object(batches), strict=True)  # of all ranks
    merged = [[[x for batch in step for x in batch[column]] for column in (0, 1)] for step in steps]
    alone = [tuple(torch.tensor(column, dtype=torch.float64) for column in batch) for batch in merged]
    assert sum(len(x) for x, _ in alone) == 2 * TOTAL
    torch.testing.assert_close(mine, trained(alone, engine=SGDEngine(), maxepoch=1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("way", "num_workers"),
    [("files", 0), *(pytest.param(way, 2, marks=pytest.mark.slow) for way in ("files", "iterable"))],
)
def test_a_checkpoint_in_the_middle_of_an_epoch(mpi, pattern, folder, way, num_workers):
    """Resumed twice on the same ranks, with other workers: each epoch uses every sample once."""
    used = []

    def run(num_workers, **options):
        def on_update(state):
            used.append((state.epoch, together(mpi, numbers_in(state.sample, state.num_samples))))

        iterator = StreamIterator(stream(way, pattern), 2, num_workers=num_workers, seed=1)
        trained(iterator, checkpoint=folder / "runs", every=1, on_update=on_update, **options)
        return used

    for killed_at in (2, 4):
        run(num_workers, killed_at=killed_at)
        used.pop()  # it was not saved
    run(2 - num_workers)
    for epoch in (0, 1):
        assert sorted(number for e, numbers in used if e == epoch for number in numbers) == list(range(TOTAL))


def test_a_checkpoint_of_other_files_is_refused(mpi, pattern, folder):
    options = {"checkpoint": folder / "runs", "every": 1}
    assert trained(StreamIterator(Shards(pattern, read), 1), killed_at=2, **options) is None
    fewer = Shards(pattern.replace("*", "[3-6]"), read)
    with pytest.raises(CheckpointError, match=r"the saved order is {.*, but this iterator has {"):
        trained(StreamIterator(fewer, 1), **options)
    with pytest.raises(ValueError, match="position=2: a stream continues only from a saved state"):
        StreamIterator(fewer, 1).set_position(2)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one file", "one sample"])
def test_readers_without_anything_to_read(mpi, pattern, way, caplog):
    caplog.set_level(logging.WARNING, "torchmpi_py")
    one = Shards(pattern.replace("*", "3"), read) if way == "one file" else Stream(1)
    iterator = StreamIterator(one, 2, num_workers=2)
    for _ in range(2):
        assert len(epoch_of(mpi, iterator)) == (23 if way == "one file" else 1)
    trained(iterator)
    said = ["1 files for" in record.getMessage() for record in caplog.records]
    assert said == [True, True] * (mpi.rank() == 0 and way == "one file")


@pytest.mark.parametrize("way", ["files", "iterable"])
def test_dropping_the_steps_in_which_a_rank_has_no_batch(mpi, pattern, way):
    iterator = StreamIterator(stream(way, pattern), 2, drop_last=True)
    batches = [(numbers_in(batch, iterator.num_samples), iterator.weight) for batch in iterator]
    assert all(numbers and weight > 0 for numbers, weight in batches)
    assert len({len(each) for each in mpi.allgather_object(batches)}) == 1
    used = together(mpi, [number for numbers, _ in batches for number in numbers])
    assert len(set(used)) == len(used) == iterator.position <= TOTAL
    assert iterator.state_dict()["position"] == 0  # the epoch is over
    assert list(StreamIterator(Stream(0), 2)) == []  # an empty stream has no steps


def test_a_damaged_file_is_named(mpi, pattern, folder):
    if mpi.rank() == 0:
        (folder / "data-3.txt").write_text("12\nthirteen\n")
    mpi.barrier()
    with (
        pytest.raises(RuntimeError, match=r"data-3.txt: ValueError: "),
        mpi.at(mpi.push_communicator(f"alone {mpi.rank()}")),
    ):
        list(StreamIterator(Shards(pattern, read), 2))


@pytest.mark.mpi(min_size=2)
def test_streams_that_differ_are_refused_on_all_ranks(mpi, pattern):
    files = Shards(pattern, read).files
    with pytest.raises(ValueError, match=r"files is \["):
        iter(StreamIterator(Shards(files[:-1] if mpi.rank() == 1 else files, read), 2))
    for name, value in (("batch_size", 3 + mpi.rank()), ("seed", mpi.rank()), ("num_workers", mpi.rank() % 2)):
        with pytest.raises(ValueError, match=rf"{name} is \["):
            iter(StreamIterator(Shards(files, read), **{"batch_size": 2, name: value}))
    iterator = StreamIterator(Shards(files, read), 2)
    with pytest.raises(ValueError, match="was created for rank"), mpi.at(mpi.push_communicator(mpi.rank())):
        iter(iterator)


def test_nonsense_is_refused(mpi, tmp_path):
    with pytest.raises(ValueError, match="expected at least one file, found none"):
        Shards(f"{tmp_path}/*.tar", read)
    with pytest.raises(TypeError, match="stream is a list"):
        StreamIterator([1], 2)
    with pytest.raises(TypeError, match="use a StreamIterator"):
        DatasetIterator(Stream(), 2)
    for name in ("batch_size", "seed", "prefetch", "num_workers"):
        with pytest.raises(ValueError, match=f"{name}=-1"):
            StreamIterator(Stream(), **{"batch_size": 1, name: -1})
