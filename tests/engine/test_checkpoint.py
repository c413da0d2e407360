"""Checkpoints in a world of one: what goes on from one ends as if it had not been interrupted."""

import json
import logging
import os
import pickle
import random
import shutil
import threading
import zlib

import numpy as np
import pytest
import torch
from checkpoint_folder import listed
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from torchmpi_py import errors
from torchmpi_py.engine import (
    Average,
    Checkpoints,
    DatasetIterator,
    SGDEngine,
    checkpoint,
    checkpoint_files,
    resume,
)
from torchmpi_py.engine.samples import derive_random_states, random_states

pytestmark = [
    pytest.mark.timeout(240),
    # Of a run that goes on at the very end of an epoch, where no step comes before the schedule's.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """For a file system that shows things later."""
    monkeypatch.setattr(checkpoint, "SEEN_WITHIN_SECONDS", 0.0)


class Killed(Exception):
    """Stands for a kill, in between steps."""


def samples():
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator))


def drawn_with_replacement():
    """It draws from its generator now and then, all through the epoch."""
    return RandomSampler(samples(), replacement=True, generator=torch.Generator().manual_seed(4))


ITERATORS = {
    "prefetch": lambda: DatasetIterator(samples(), 8, seed=1),
    "inline": lambda: DatasetIterator(samples(), 8, prefetch=0),
    "DataLoader": lambda: DataLoader(samples(), 8, shuffle=True),
    "own generator": lambda: DataLoader(samples(), 8, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "sampler": lambda: DataLoader(samples(), batch_sampler=BatchSampler(drawn_with_replacement(), 8, False)),
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
    resume.completed.clear()  # as if in a process of its own
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
    assert sorted(listed(tmp_path)) == ["step-000014", "step-000021", "step-000028"]


@pytest.mark.parametrize("iterator", list(ITERATORS))
@pytest.mark.parametrize("every", [1, 3, 7])
def test_it_goes_on_in_the_middle_of_an_epoch(tmp_path, iterator, every):
    expected = trained(iterator=iterator)
    for killed_at in (1, 5, 7, 8, 15, 22, 28):
        assert trained(tmp_path, killed_at=killed_at, every=every, iterator=iterator) is None
    assert torch.equal(trained(tmp_path, every=every, iterator=iterator), expected)
    assert len(listed(tmp_path)) == 3


@pytest.mark.parametrize(("every", "seed"), [(3, None), ("epoch", None), (3, 4)])
def test_it_goes_on_with_workers_that_persist(tmp_path, monkeypatch, every, seed):
    """Their seed is drawn when they start: in the first epoch of each process."""

    def loader():
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        workers = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(samples(), 8, shuffle=True, generator=generator, **workers)

    monkeypatch.setitem(ITERATORS, "workers", loader)
    options = {"iterator": "workers", "maxepoch": 3}
    expected = trained(**options)
    assert trained(tmp_path, killed_at=13, every=every, **options) is None  # in the second epoch
    assert torch.equal(trained(tmp_path, every=every, **options), expected)


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
    assert sorted(listed(tmp_path / "a" / "b")) == ["step-000005", "step-000012"]


def test_a_step_is_replaced_and_an_earlier_one_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"x": 1})
    checkpoints.save(3, {"x": 2})
    assert checkpoints.load() == (3, {"x": 2})
    with pytest.raises(errors.CheckpointError, match="holds a checkpoint of step 3, which is later than 2"):
        checkpoints.save(2, {"x": 3})
    assert listed(tmp_path) == ["step-000003"]


def shorten(folder):
    path = folder / "model.pt"
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder):
    path = folder / "rank-0.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace(folder, old, new):
    path = folder / "checkpoint.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def rewrite(folder, **changes):
    """Change what checkpoint.json says, and its checksum."""
    summary = json.loads((folder / "checkpoint.json").read_text()) | changes
    del summary["crc32"]
    summary["crc32"] = zlib.crc32(json.dumps(summary, sort_keys=True).encode())
    (folder / "checkpoint.json").write_text(json.dumps(summary))


DAMAGES = {
    "bytes of": shorten,
    "checksum": flip,
    "model.pt is missing": lambda folder: (folder / "model.pt").unlink(),
    "checkpoint.json cannot be read": lambda folder: (folder / "checkpoint.json").write_text('{"format": 1, "fi'),
    "checkpoint.json cannot": lambda folder: (folder / "checkpoint.json").unlink(),
    "checkpoint.json does not hold": lambda folder: replace(folder, '"size": 1', '"size": 0'),
    "checkpoint.json does not hold what": lambda folder: replace(folder, '"format": 1', '"format": 3'),
    "checkpoint.json is of step 7": lambda folder: rewrite(folder, step=7),
    "does not name the files of 1 ranks": lambda folder: rewrite(folder, files={}),
    "NotADirectoryError": lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
}


@pytest.mark.parametrize("said", list(DAMAGES))
def test_a_damaged_one_is_passed_over(tmp_path, caplog, said):
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, {"x": step})
    DAMAGES[said](tmp_path / "step-000002")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() == (1, {"x": 1})
    assert "step-000002 is damaged and passed over" in caplog.text
    assert said in caplog.text
    checkpoints.save(2, {"x": 5})
    assert sorted(listed(tmp_path)) == ["step-000001", "step-000002", "step-000002.damaged"]
    assert checkpoints.load() == (2, {"x": 5})


def test_when_all_are_damaged_it_begins_anew(tmp_path, caplog):
    Checkpoints(tmp_path).save(4, {"x": 1})
    shorten(tmp_path / "step-000004")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    checkpoints.save(1, {"x": 2})
    checkpoints.save(4, {"x": 3})  # what is damaged is forgotten when it is set aside
    checkpoints.save(5, {"x": 4})
    assert sorted(listed(tmp_path)) == ["step-000001", "step-000004", "step-000004.damaged", "step-000005"]


def test_what_a_later_version_wrote_is_an_error(tmp_path):
    folder = Checkpoints(tmp_path).save(1, {"x": 1})
    rewrite(folder, format=2)
    with pytest.raises(errors.CheckpointError, match="has format 2, and this torchmpi_py reads up to 1"):
        Checkpoints(tmp_path).load()


def test_a_full_disk(tmp_path, full_disk):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.zeros(9)})
    message = r"step 2 .* rank 0 on .*rank-0.pt: No space left on device"
    with full_disk(), pytest.raises(errors.CheckpointError, match=message):
        checkpoints.save(2, {"x": torch.zeros(9)})
    assert listed(tmp_path) == ["step-000001"]


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(errors.CheckpointError, match=r"the folder cannot be used: rank 0 on .*/x: File exists"):
        Checkpoints(tmp_path / "x").load()


def test_only_data_is_saved_and_read(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match=r"parts\['model'\]\['f'\]\[1\] is a builtins.function"):
        checkpoints.save(1, {"model": {"f": [1, lambda: None]}})
    with pytest.raises(TypeError, match=r"own\['n'\] is a numpy.ndarray.*torch.from_numpy\(x\)"):
        checkpoints.save(1, {}, own={"n": np.ones(1)})
    with pytest.raises(ValueError, match="step=-1 must not be negative"):
        checkpoints.save(-1, {})
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
    files = json.loads((folder / "checkpoint.json").read_text())["files"]
    rewrite(folder, files=files | {"model.pt": written})
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
        resume.completed.clear()
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


def trained_by(made, folder, maxepoch, length=1):
    """Train a little, with an optimizer that alone holds a parameter of this length; the parameter."""
    resume.completed.clear()
    network, scale = torch.nn.Linear(3, 1), torch.nn.Parameter(torch.ones(length))
    SGDEngine().train(
        network=network,
        criterion=lambda output, target: ((output - target) * scale).square().mean(),
        iterator=[(torch.ones(2, 3), torch.zeros(2, 1))],
        optimizer=made([*network.parameters(), scale]),
        maxepoch=maxepoch,
        checkpoint=folder,
    )
    return scale


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def without_kind(monkeypatch):
    """Save as versions did that did not save the optimizer's class."""
    collected = resume.Saving._collected

    def former(self, state):
        parts, own = collected(self, state)
        return {name: part for name, part in parts.items() if name != "optimizer_kind"}, own

    monkeypatch.setattr(resume.Saving, "_collected", former)


@pytest.mark.parametrize("number", range(4))
def test_another_optimizer_is_an_error(tmp_path, number):
    saved, now = [
        (torch.optim.AdamW, torch.optim.Adam),
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.Adam, torch.optim.RMSprop),
        (momentum, torch.optim.Adam),
    ][number]
    names = {momentum: "SGD", torch.optim.AdamW: "AdamW", torch.optim.Adam: "Adam", torch.optim.RMSprop: "RMSprop"}
    trained_by(saved, tmp_path, 1)
    message = rf"trained by the optimizer {names[saved]}, and this one is {names[now]}$"
    with pytest.raises(errors.CheckpointError, match=message):
        trained_by(now, tmp_path, 2)


def test_parameters_of_another_shape_are_an_error(tmp_path):
    """torch would broadcast the first; the second is of moments."""
    trained_by(momentum, tmp_path / "a", 1)
    with pytest.raises(errors.CheckpointError, match=r"only the optimizer holds has shape \(1,\) in .* \(5,\)"):
        trained_by(momentum, tmp_path / "a", 2, length=5)
    trained_by(momentum, tmp_path / "b", 1, length=3)
    message = r"parameter 0 of its SGD has shape \(1, 3\), and of this one \(3,\)"
    with pytest.raises(errors.CheckpointError, match=message):
        trained_by(lambda parameters: momentum(parameters[::-1]), tmp_path / "b", 2, length=3)


def test_a_checkpoint_without_the_class_of_its_optimizer(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        without_kind(patched)
        trained_by(momentum, tmp_path, 1)
        trained_by(torch.optim.SGD, tmp_path / "plain", 1)
    with pytest.raises(errors.CheckpointError, match="holds no betas, eps of the optimizer Adam"):
        trained_by(torch.optim.Adam, tmp_path / "plain", 2)
    with pytest.raises(errors.CheckpointError, match=r"only the optimizer holds has shape \(1,\) in .* \(5,\)"):
        trained_by(momentum, tmp_path, 2, length=5)
    assert trained_by(momentum, tmp_path, 2).item() != 1


class Tag:
    """What no file of plain data holds."""


def test_tensors_are_saved_without_attributes_of_a_program(tmp_path):
    parameter, tensor = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.zeros(3, requires_grad=True)
    for each in (parameter, tensor):
        each.tag = Tag()
    Checkpoints(tmp_path).save(1, {"p": parameter, "views": [tensor, tensor, tensor.detach()]})
    assert all(isinstance(each.tag, Tag) for each in (parameter, tensor))
    parts = Checkpoints(tmp_path).load().parts
    assert (type(parts["p"]), parts["p"].requires_grad, vars(parts["p"])) == (torch.nn.Parameter, False, {})
    first, second, view = parts["views"]
    assert first is second
    assert (type(first), first.requires_grad, first.data_ptr()) == (torch.Tensor, True, view.data_ptr())


def test_numbers_that_are_not_read_back_are_refused(tmp_path):
    widest = {"least": -(2**2039), "most": 2**2039 - 1}
    Checkpoints(tmp_path).save(1, widest)
    assert Checkpoints(tmp_path).load().parts == widest
    for number, said in [
        (2**2039, "int of more than 255 bytes"),
        (-(2**2039) - 1, "int of more than 255 bytes"),
        (np.longdouble(1), np.longdouble.__name__),
        (np.clongdouble(1), np.clongdouble.__name__),
    ]:
        with pytest.raises(TypeError, match=rf"parts\['x'\] is a (numpy\.)?{said}, which a checkpoint does not hold"):
            Checkpoints(tmp_path).save(2, {"x": number})


def test_numbers_of_numpy_are_taken_as_pythons(tmp_path):
    versions = torch.nn.BatchNorm1d(2).state_dict()
    versions["x"] = np.float32(0.5)
    versions["y"], versions["z"] = np.complex64(1j), np.complex128(2j)
    Checkpoints(tmp_path).save(1, {"x": {np.int64(3): [np.float64(1.5), np.bool_(True)], "m": versions}})
    parts = Checkpoints(tmp_path).load().parts
    assert parts["x"][3] == [1.5, True]
    assert [type(number) for number in (*parts["x"], *parts["x"][3])] == [int, str, float, bool]
    assert [parts["x"]["m"][name] for name in "xyz"] == [0.5, 1j, 2j]
    assert [type(parts["x"]["m"][name]) for name in "xyz"] == [float, complex, complex]
    assert parts["x"]["m"]._metadata == versions._metadata


def test_a_file_that_is_seen_late(tmp_path, monkeypatch):
    folder = Checkpoints(tmp_path).save(1, {"x": 1})
    os.rename(folder / "model.pt", tmp_path / "late")
    monkeypatch.setattr(checkpoint, "SEEN_WITHIN_SECONDS", 30.0)
    timer = threading.Timer(0.3, os.rename, (tmp_path / "late", folder / "model.pt"))
    timer.start()
    assert Checkpoints(tmp_path).load() == (1, {"x": 1})
    timer.join()


def test_an_old_one_stays_where_the_new_one_is_cut_off(tmp_path, monkeypatch):
    """As on a file system that has lost the end of a part which another host has written."""
    checkpoints, write = Checkpoints(tmp_path, keep=1), checkpoint_files.write
    checkpoints.save(1, {"x": 1})

    def cutting(path, content):
        entry = write(path, content)
        if path.name == "rank-0.pt":
            os.truncate(path, 10)
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "write", cutting)
        with pytest.raises(errors.CheckpointError, match=r"step 2 cannot be saved: .*rank-0.pt has 10 bytes of"):
            checkpoints.save(2, {"x": 2})
    assert Checkpoints(tmp_path).load() == (1, {"x": 1})


def test_an_old_one_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    rename = os.rename

    def refusing(source, target):
        if ".removed" in str(target):
            raise OSError(16, "Device or resource busy")
        rename(source, target)

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": 1})
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refusing)
        checkpoints.save(2, {"x": 2})
    assert "step-000001 cannot be removed, or be renamed: Device or resource busy" in caplog.text
    checkpoints.save(3, {"x": 3})
    assert listed(tmp_path) == ["step-000003"]


def test_folders_that_were_made_are_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(checkpoint_files, "sync", synced.append)
    Checkpoints(tmp_path / "a" / "b").load()
    assert synced == [tmp_path / "a", tmp_path]


def test_another_order_in_the_middle_of_an_epoch_is_refused(tmp_path):
    assert trained(tmp_path, every=3, killed_at=4) is None
    with pytest.raises(ValueError, match=r"over 50 samples, seed 1, shuffle True; this is another order: .* seed 0"):
        trained(tmp_path, iterator="inline")


def test_derived_random_numbers_follow_from_rank_0_and_differ_by_rank():
    states = random_states()

    def drawn(rank):
        derive_random_states(states, rank)
        return torch.rand(1).item(), np.random.rand(), random.random()

    assert drawn(4) == drawn(4)
    assert len({number for rank in (4, 5, 6) for number in drawn(rank)}) == 9


LOADERS = {
    "another dataset": lambda: DataLoader(TensorDataset(*samples()[:49]), 8, shuffle=True),
    "another batch size": lambda: DataLoader(samples(), 7, shuffle=True),
    "without its generator": lambda: DataLoader(samples(), 8),
}


@pytest.mark.parametrize("other", list(LOADERS))
def test_another_loader_in_the_middle_of_an_epoch_is_refused(tmp_path, monkeypatch, other):
    assert trained(tmp_path, every=3, killed_at=4, iterator="own generator") is None
    monkeypatch.setitem(ITERATORS, other, LOADERS[other])
    message = "over 50 samples, 7 batches, batch size 8, generators of iterator, sampler, .*; this is another order"
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, every=3, iterator=other)


def test_parameters_that_only_the_optimizer_holds(tmp_path):
    def run(maxepoch, folder=None):
        torch.manual_seed(2)
        resume.completed.clear()
        network, scale = torch.nn.Linear(6, 3), torch.nn.Parameter(torch.ones(3))
        options = {} if folder is None else {"checkpoint": folder}
        SGDEngine().train(
            network=network,
            criterion=lambda output, target: torch.nn.functional.cross_entropy(output * scale, target),
            iterator=DatasetIterator(samples(), 8),
            optimizer=torch.optim.SGD([*network.parameters(), scale], lr=0.1),
            maxepoch=maxepoch,
            **options,
        )
        return scale.detach()

    run(1, tmp_path)
    assert torch.equal(run(2, tmp_path), run(2))


def training(folder, maxepoch, *, network=None, on_end_epoch=lambda state: None, **options):
    """The state at the end of a small one."""
    engine = SGDEngine()
    engine.hooks.on_end_epoch = on_end_epoch
    return engine.train(
        network=network or torch.nn.Linear(6, 3),
        criterion=torch.nn.CrossEntropyLoss(),
        iterator=DatasetIterator(samples(), 8),
        lr=0.1,
        maxepoch=maxepoch,
        checkpoint=folder,
        **options,
    )


def test_killed_at_the_end_of_an_epoch_the_last_loss_is_there(tmp_path):
    seen = []

    def dies(state):
        seen.append(f"{state.loss:.9f}")
        raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            training(tmp_path, 2, on_end_epoch=dies, every=1)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("every", ["epoch", 2])
def test_training_that_was_ended_early_is_complete(tmp_path, caplog, every):
    def ends_early(state):
        if state.epoch == 2:
            state.maxepoch = 2

    def run(maxepoch, hook=lambda state: None):
        resume.completed.clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, "torchmpi_py"):
            return training(tmp_path, maxepoch, on_end_epoch=hook, every=every)

    assert run(5, ends_early).epoch == 2
    for maxepoch in (5, 3, 2, 1):
        assert run(maxepoch).t == 14
        assert "is of a training that is complete: nothing is left to do" in caplog.text
    assert run(6).epoch == 6
    assert "resumed from" in caplog.text
    assert "complete" not in caplog.text


def test_one_that_ends_it_within_an_epoch_means_its_end(tmp_path):
    ended = []

    def run(killed_at=None):
        def on_update(state):
            if state.t == 9:
                state.maxepoch = 1
            if state.t == killed_at:
                raise Killed

        engine = SGDEngine()
        engine.hooks.on_update = on_update
        engine.hooks.on_end_epoch = lambda state: ended.append(state.epoch)
        engine.train(
            network=torch.nn.Linear(6, 3),
            criterion=torch.nn.CrossEntropyLoss(),
            iterator=DatasetIterator(samples(), 8),
            lr=0.1,
            maxepoch=5,
            checkpoint=tmp_path,
            every=1,
        )

    with pytest.raises(Killed):
        run(killed_at=12)
    run()
    assert ended == [1, 2]


def test_another_network_in_the_same_folder_is_refused(tmp_path):
    network = torch.nn.Linear(6, 3)
    training(tmp_path, 1, network=network)
    with pytest.raises(ValueError, match=r"has trained another network with checkpoint='.*': give each a folder"):
        training(tmp_path, 2)
    assert training(tmp_path, 2, network=network).epoch == 2
