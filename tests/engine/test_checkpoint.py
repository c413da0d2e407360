"""Checkpoints in a world of one: what goes on from one ends as if it had not been interrupted."""

import json
import os
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchmpi_py import errors
from torchmpi_py.engine import Average, Checkpoints, DatasetIterator, SGDEngine, checkpoint_files, random_states

pytestmark = [
    pytest.mark.timeout(60),
    # Of a run that goes on at the very end of an epoch, where no step comes before the schedule's.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


class Killed(Exception):
    """Stands for a kill, in between steps."""


def samples():
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator))


ITERATORS = {
    "prefetch": lambda: DatasetIterator(samples(), 8, seed=1),
    "inline": lambda: DatasetIterator(samples(), 8, prefetch=0),
    "DataLoader": lambda: DataLoader(samples(), 8, shuffle=True),
}
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class Criterion(torch.nn.Module):
    """One with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return torch.nn.functional.cross_entropy(output * self.scale, target)


def trained(folder=None, maxepoch=4, killed_at=None, iterator="prefetch", optimizer="Adam", **options):
    """All that training has made, as one tensor."""
    torch.manual_seed(3)
    random.seed(3)
    layers = [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)]
    network, criterion = torch.nn.Sequential(*layers), Criterion()
    parameters = [*network.parameters(), *criterion.parameters()]
    made = OPTIMIZERS[optimizer](parameters)
    schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.9)
    noise, loss = [], Average()

    def on_update(state):
        loss.add(state.loss, state.num_samples)
        noise.append(random.random())
        if state.t == killed_at:
            raise Killed

    engine = SGDEngine()
    engine.hooks.on_update = on_update
    engine.hooks.on_end_epoch = lambda state: schedule.step()
    if folder is not None:
        options |= {"checkpoint": folder, "stateful": {"schedule": schedule, "loss": loss}}
    try:
        iterator = ITERATORS[iterator]()
        engine.train(
            network=network, criterion=criterion, iterator=iterator, optimizer=made, maxepoch=maxepoch, **options
        )
    except Killed:
        return None
    kept = [*network.state_dict().values(), *criterion.state_dict().values()]
    counted = torch.tensor([schedule.get_last_lr()[0], noise[-1] if noise else 0, loss.value], dtype=torch.float64)
    return torch.cat([*(tensor.double().flatten() for tensor in kept), counted])


def weights(result):
    """Without what a run that had nothing left to do does not know: its last random number."""
    return torch.cat([result[:-2], result[-1:]])


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("iterator", list(ITERATORS))
def test_two_and_two_epochs_are_four_bit_for_bit(tmp_path, iterator, optimizer):
    options = {"iterator": iterator, "optimizer": optimizer}
    expected = trained(**options)
    trained(tmp_path, maxepoch=2, **options)
    assert torch.equal(trained(tmp_path, **options), expected)
    assert torch.equal(weights(trained(tmp_path, **options)), weights(expected))  # nothing is left to do
    assert sorted(os.listdir(tmp_path)) == ["step-000014", "step-000021", "step-000028"]


@pytest.mark.parametrize("iterator", list(ITERATORS))
@pytest.mark.parametrize("every", [1, 3, 7])
def test_it_goes_on_in_the_middle_of_an_epoch(tmp_path, iterator, every):
    expected = trained(iterator=iterator)
    for killed_at in (1, 5, 7, 8, 15, 22, 28):
        assert trained(tmp_path, killed_at=killed_at, every=every, iterator=iterator) is None
    assert torch.equal(trained(tmp_path, every=every, iterator=iterator), expected)
    assert len(os.listdir(tmp_path)) == 3


def test_random_kills(tmp_path):
    expected = trained()
    draw = random.Random(5)
    for trial in range(8):
        folder, reached = tmp_path / f"{trial}", 0
        every = draw.choice([1, 2, 4, 5, "epoch"])
        for _ in range(draw.randrange(1, 4)):
            reached = min(reached + draw.randrange(1, 12), 28)
            assert trained(folder, killed_at=reached, every=every, keep=draw.choice([1, 3])) is None
        assert torch.equal(trained(folder, every=every), expected), (trial, every)


def test_the_rest_of_an_epoch_uses_each_sample_once_at_another_batch_size(tmp_path):
    dataset = TensorDataset(torch.arange(50.0).unsqueeze(1), torch.arange(50))
    used = []

    def run(batch_size, killed_at=None):
        def on_update(state):
            used.extend(state.sample[1].tolist())
            if state.t == killed_at:
                raise Killed

        engine = SGDEngine()
        engine.hooks.on_update = on_update
        engine.train(
            network=torch.nn.Linear(1, 1),
            criterion=lambda output, target: output.mean(),
            iterator=DatasetIterator(dataset, batch_size),
            lr=0.01,
            checkpoint=tmp_path,
            every=1,
        )

    with pytest.raises(Killed):
        run(8, killed_at=3)
    del used[16:]  # the step that was not saved
    run(5)
    assert sorted(used) == list(range(50))


def test_a_loop_of_ones_own(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=2)
    assert checkpoints.load() is None
    for step in (1, 5, 12):
        folder = checkpoints.save(step, {"model": {"w": torch.full((2,), float(step))}, "text": "x"}, own={"seen": [1]})
    assert folder.name == "step-000012"
    drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
    step, parts = Checkpoints(tmp_path / "a" / "b").load()
    assert (step, parts["text"], parts["seen"]) == (12, "x", [1])
    assert torch.equal(parts["model"]["w"], torch.full((2,), 12.0))
    assert drawn == [torch.rand(1).item(), np.random.rand(), random.random()]
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["step-000005", "step-000012"]


def test_a_step_is_replaced_and_an_earlier_one_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"x": 1})
    checkpoints.save(3, {"x": 2})
    assert checkpoints.load() == (3, {"x": 2})
    with pytest.raises(errors.CheckpointError, match="holds a checkpoint of step 3, which is later than 2"):
        checkpoints.save(2, {"x": 3})
    assert os.listdir(tmp_path) == ["step-000003"]


def shorten(folder):
    path = folder / "model.pt"
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder):
    path = folder / "rank-0.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "1038 bytes|bytes of": shorten,
    "checksum": flip,
    "model.pt is missing": lambda folder: (folder / "model.pt").unlink(),
    "checkpoint.json cannot be read": lambda folder: (folder / "checkpoint.json").write_text('{"format": 1, "fi'),
    "checkpoint.json cannot": lambda folder: (folder / "checkpoint.json").unlink(),
}


@pytest.mark.parametrize("said", list(DAMAGES))
def test_a_damaged_one_is_passed_over(tmp_path, caplog, said):
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, {"x": step})
    DAMAGES[said](tmp_path / "step-000002")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() == (1, {"x": 1})
    assert "step-000002 is damaged and passed over" in caplog.text
    assert any(part in caplog.text for part in said.split("|"))
    checkpoints.save(2, {"x": 5})
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002", "step-000002.damaged"]
    assert checkpoints.load() == (2, {"x": 5})


def test_when_all_are_damaged_it_begins_anew(tmp_path, caplog):
    Checkpoints(tmp_path).save(4, {"x": 1})
    shorten(tmp_path / "step-000004")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    checkpoints.save(1, {"x": 2})
    assert Checkpoints(tmp_path).load() == (1, {"x": 2})


def test_what_a_later_version_wrote_is_an_error(tmp_path):
    folder = Checkpoints(tmp_path).save(1, {"x": 1})
    summary = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps(summary | {"format": 2}))
    with pytest.raises(errors.CheckpointError, match="has format 2, and this torchmpi_py reads up to 1"):
        Checkpoints(tmp_path).load()


def test_a_full_disk(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.zeros(9)})

    dev_full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    class Full(checkpoint_files._Stream):
        def __init__(self, file):
            super().__init__(dev_full)

    monkeypatch.setattr(checkpoint_files, "_Stream", Full)
    with pytest.raises(errors.CheckpointError, match=r"step 2 .* rank 0 on .*rank-0.pt: No space left on device"):
        checkpoints.save(2, {"x": torch.zeros(9)})
    dev_full.close()
    assert os.listdir(tmp_path) == ["step-000001"]


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(errors.CheckpointError, match=r"the folder cannot be used: rank 0 on .*/x: File exists"):
        Checkpoints(tmp_path / "x").load()


def test_only_data_is_saved_and_read(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match=r"parts\['model'\]\['f'\]\[1\] is a builtins.function"):
        checkpoints.save(1, {"model": {"f": [1, lambda: None]}})
    with pytest.raises(TypeError, match=r"own\['n'\] is a numpy.float64.*x.item\(\)"):
        checkpoints.save(1, {}, own={"n": np.float64(1)})
    with pytest.raises(ValueError, match=r"\['a'\] are both in parts and in own"):
        checkpoints.save(1, {"a": 1}, own={"a": 1})
    assert checkpoints.load() is None


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_file_that_would_run_code_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Checkpoints(tmp_path / "c").save(1, {"x": 1})
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda content, stream: stream.write(pickle.dumps(Bomb())))
        written = checkpoint_files.write(folder / "model.pt", None)
    summary = json.loads((folder / "checkpoint.json").read_text())
    summary["files"]["model.pt"] = written
    (folder / "checkpoint.json").write_text(json.dumps(summary))
    with pytest.raises(errors.CheckpointError, match=r"UserWarning: Detected pickle protocol|UnpicklingError"):
        Checkpoints(tmp_path / "c").load()
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0: give a positive number"),
        ({"every": "step"}, "every='step'"),
        ({"keep": 0}, "keep=0"),
        ({"stateful": {"s": 3}}, r"stateful\['s'\] is a int"),
        ({"checkpoint": None, "stateful": {"s": Average()}}, "give checkpoint=DIRECTORY too"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    given = {"checkpoint": tmp_path, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        SGDEngine().train(network=torch.nn.Linear(1, 1), criterion=torch.nn.MSELoss(), iterator=[], lr=0.1, **given)


def test_what_does_not_fit_is_an_error(tmp_path):
    def train(network, lr=0.1, **options):
        sample = (torch.zeros(2, 3), torch.zeros(2, 1))
        engine, criterion = SGDEngine(), torch.nn.MSELoss()
        engine.train(network=network, criterion=criterion, iterator=[sample], lr=lr, checkpoint=tmp_path, **options)

    train(torch.nn.Linear(3, 1))
    with pytest.raises(
        errors.CheckpointError, match=r"step 1 of .* does not fit what is trained now: (.|\n)*size mismatch"
    ):
        train(torch.nn.Linear(3, 2))
    with pytest.raises(errors.CheckpointError, match="one of them has no optimizer"):
        train(torch.nn.Linear(3, 1), lr=0)
    with pytest.raises(errors.CheckpointError, match=r"holds nothing of stateful\['loss'\]"):
        train(torch.nn.Linear(3, 1), stateful={"loss": Average()})


def test_another_order_in_the_middle_of_an_epoch_is_refused(tmp_path):
    assert trained(tmp_path, every=3, killed_at=4) is None
    with pytest.raises(ValueError, match=r"over 50 samples, seed 1, shuffle True; this is another order: .* seed 0"):
        trained(tmp_path, iterator="inline")


def test_derived_random_numbers_follow_from_rank_0_and_differ_by_rank():
    states = random_states.captured()

    def drawn(rank):
        random_states.derive(states, rank)
        return torch.rand(1).item(), np.random.rand(), random.random()

    assert drawn(4) == drawn(4)
    assert len({number for rank in (4, 5, 6) for number in drawn(rank)}) == 9
