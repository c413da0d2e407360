"""Training with checkpoints in a world of one: what goes on from one ends as if it had not been interrupted."""

import logging
import os
import random
import signal

import pytest
import torch
from runs import Killed, classes, listed, loss_of, train
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from torchmpi_py import errors
from torchmpi_py.engine import Average, Checkpoint, DatasetIterator, SGDEngine

pytestmark = [
    pytest.mark.usefixtures("no_waiting"),
    # Of a run that goes on at the very end of an epoch, where no step comes before the schedule's.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


def samples(total=50):
    return classes(total)


def loader(seed=None, **options):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(samples(), 8, shuffle=True, generator=generator, **options)


def drawn_with_replacement():
    """It draws from its generator now and then, all through the epoch."""
    return RandomSampler(samples(), replacement=True, generator=torch.Generator().manual_seed(4))


ITERATORS = {
    "prefetch": lambda: DatasetIterator(samples(), 8, seed=1),
    "inline": lambda: DatasetIterator(samples(), 8, prefetch=0),
    "DataLoader": lambda: loader(),
    "own generator": lambda: loader(seed=3),
    "sampler": lambda: DataLoader(samples(), batch_sampler=BatchSampler(drawn_with_replacement(), 8, False)),
    "workers": lambda: loader(num_workers=1, persistent_workers=True),
    "workers with a generator": lambda: loader(seed=4, num_workers=1, persistent_workers=True),
    "drawn": lambda: DatasetIterator(samples(), 8, sampler=drawn_with_replacement()),
    "fewer samples": lambda: DatasetIterator(samples(49), 8, seed=1),
}


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


class Criterion(torch.nn.Module):
    """One with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return loss_of(output * self.scale, target)


def trained(folder=None, maxepoch=4, iterator="prefetch", optimizer=adam, **options):
    """Return all that training has made, as one tensor; None if it was killed."""
    torch.manual_seed(3)
    random.seed(3)
    layers = [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)]
    network, criterion = torch.nn.Sequential(*layers), Criterion()
    made = optimizer([*network.parameters(), *criterion.parameters()])
    schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.9)
    noise, loss = [], Average()

    def on_update(state):
        loss.add(state.loss, state.num_samples)
        noise.append(random.random())

    options |= {"on_update": on_update, "on_end_epoch": lambda state: schedule.step()}
    if folder is not None:
        options |= {"checkpoint": folder, "stateful": {"schedule": schedule, "loss": loss}}
    options |= {"engine": SGDEngine(), "criterion": criterion, "optimizer": made, "maxepoch": maxepoch}
    if train(network, ITERATORS[iterator](), **options) is None:
        return None
    kept = [*network.state_dict().values(), *criterion.state_dict().values()]
    counted = torch.tensor([schedule.get_last_lr()[0], noise[-1] if noise else 0, loss.value], dtype=torch.float64)
    return torch.cat([*(tensor.double().flatten() for tensor in kept), counted])


def weights(result):
    """Return it without what a run that had nothing left to do does not know: its last random number."""
    return torch.cat([result[:-2], result[-1:]])


@pytest.mark.parametrize(
    ("iterator", "every", "optimizer", "keep"),
    [
        *(("prefetch", 1, momentum, 1), ("prefetch", 3, adam, 3), ("inline", "epoch", adam, 2)),
        *(("DataLoader", "epoch", momentum, 3), ("own generator", "epoch", adam, 1)),
        *(("drawn", 3, adam, 3), ("sampler", "epoch", momentum, 3)),
    ],
)
def test_it_goes_on_bit_for_bit(tmp_path, iterator, every, optimizer, keep):
    """After epochs, and in the middle of others."""
    options = {"iterator": iterator, "optimizer": optimizer}
    expected = trained(**options)
    options |= {"every": every, "keep": keep}
    for killed_at in (1, 5, 8):
        assert trained(tmp_path, maxepoch=2, killed_at=killed_at, **options) is None
    trained(tmp_path, maxepoch=2, **options)
    for killed_at in (15, 21, 22, 28):
        assert trained(tmp_path, killed_at=killed_at, **options) is None
    assert torch.equal(trained(tmp_path, **options), expected)
    assert torch.equal(weights(trained(tmp_path, **options)), weights(expected))  # nothing is left to do
    assert len(listed(tmp_path)) == keep


@pytest.mark.parametrize("iterator", ["workers", "workers with a generator"])
def test_it_goes_on_with_workers_that_persist(tmp_path, iterator):
    """Their seed is drawn when they start: in the first epoch of each process."""
    options = {"iterator": iterator, "maxepoch": 3}
    expected = trained(**options)
    assert trained(tmp_path, killed_at=13, **options) is None  # in the second epoch
    assert torch.equal(trained(tmp_path, **options), expected)


def test_an_epoch_of_a_loader_whose_place_is_not_known_begins_again(tmp_path, caplog):
    steps = []
    with caplog.at_level(logging.WARNING, "torchmpi_py"):
        train(
            *(torch.nn.Linear(6, 3), loader()),
            engine=SGDEngine(),
            checkpoint=tmp_path,
            every=3,
            on_update=lambda state: steps.append(state.position),
            killed_at=5,
        )
        train(torch.nn.Linear(6, 3), loader(), engine=SGDEngine(), checkpoint=tmp_path, on_update=steps.append)
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert len(steps) == 5 + 7
    assert "a DataLoader in the epoch is unknown, so the epoch begins again" in caplog.text


@pytest.mark.parametrize(
    ("now", "message"),
    [("inline", "'seed': 1, .*, but .* 'seed': 0"), ("fewer samples", "order is {'samples': 50, ")],
)
def test_another_order_in_the_middle_of_an_epoch_is_refused(tmp_path, now, message):
    assert trained(tmp_path, every=3, killed_at=4, iterator="prefetch") is None
    with pytest.raises(errors.CheckpointError, match=message):
        trained(tmp_path, every=3, iterator=now)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every": 0}, r"every=0\): pass a"), ({"every": "step"}, "every='step'"), ({"keep": 0}, "keep=0")],
)
def test_wrong_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(torch.nn.Linear(1, 1), [], engine=SGDEngine(), **{"checkpoint": tmp_path, **options})


def test_what_does_not_fit_is_an_error(tmp_path):
    def run(network, **options):
        sample = (torch.zeros(2, 3), torch.zeros(2, 1))
        train(network, [sample], engine=SGDEngine(), checkpoint=tmp_path, **options)

    run(torch.nn.Linear(3, 1))
    with pytest.raises(errors.CheckpointError, match=r"step 1 of .* does not match this run: (.|\n)*size mismatch"):
        run(torch.nn.Linear(3, 2), criterion=lambda output, target: output.mean())
    with pytest.raises(errors.CheckpointError, match="only one of the saved run and this run has an optimizer"):
        run(torch.nn.Linear(3, 1), lr=0)
    with pytest.raises(errors.CheckpointError, match=r"no state of stateful\['loss'\] was saved"):
        run(torch.nn.Linear(3, 1), stateful={"loss": Average()})


def trained_by(made, folder, maxepoch, length=1):
    """Return a parameter of this length, which the optimizer alone holds, after a little training."""
    torch.manual_seed(2)
    network, scale = torch.nn.Linear(3, 1), torch.nn.Parameter(torch.ones(length))
    train(
        network,
        [(torch.ones(2, 3), torch.zeros(2, 1))],
        engine=SGDEngine(),
        criterion=lambda output, target: ((output - target) * scale).square().mean(),
        optimizer=made([*network.parameters(), scale]),
        maxepoch=maxepoch,
        checkpoint=folder,
    )
    return scale.detach()


def test_parameters_that_only_the_optimizer_holds(tmp_path):
    trained_by(momentum, tmp_path, 1)
    assert torch.equal(trained_by(momentum, tmp_path, 2), trained_by(momentum, None, 2))


def test_parameters_of_another_shape_are_an_error(tmp_path):
    trained_by(momentum, tmp_path / "a", 1)
    with pytest.raises(errors.CheckpointError, match=r"ParameterList:\s+size mismatch for 0"):
        trained_by(momentum, tmp_path / "a", 2, length=5)
    trained_by(momentum, tmp_path / "b", 1, length=3)
    with pytest.raises(errors.CheckpointError, match=r"parameter 0 has shape \(3,\), but \(1, 3\) in the state"):
        trained_by(lambda parameters: momentum(parameters[::-1]), tmp_path / "b", 2, length=3)


def training(folder, maxepoch, network=None, **options):
    """Return the state at the end of a small one."""
    options |= {"engine": SGDEngine(), "maxepoch": maxepoch, "checkpoint": folder}
    return train(network or torch.nn.Linear(6, 3), DatasetIterator(samples(), 8), **options)


def test_killed_at_the_end_of_an_epoch_the_last_loss_is_there(tmp_path):
    seen = []

    def dies(state):
        seen.append(f"{state.loss:.9f}")
        raise Killed

    for _ in range(2):
        assert training(tmp_path, 2, on_end_epoch=dies, every=1) is None
    assert seen[0] == seen[1]


@pytest.mark.parametrize("every", ["epoch", 2])
def test_training_that_was_ended_early_is_complete(tmp_path, caplog, every):
    def ends_early(state):
        if state.epoch == 2:
            state.maxepoch = 2

    caplog.set_level(logging.INFO, "torchmpi_py")
    assert training(tmp_path, 5, on_end_epoch=ends_early, every=every).epoch == 2
    for maxepoch in (5, 1):
        caplog.clear()
        assert training(tmp_path, maxepoch, every=every).t == 14
        assert "training is complete" in caplog.text
    caplog.clear()
    assert training(tmp_path, 6, every=every).epoch == 6
    assert "resumed from" in caplog.text
    assert "complete" not in caplog.text


def test_one_that_ends_it_within_an_epoch_means_its_end(tmp_path):
    ended = []

    def on_update(state):
        if state.t == 9:
            state.maxepoch = 1

    hooks = {"on_update": on_update, "on_end_epoch": lambda state: ended.append(state.epoch)}
    assert training(tmp_path, 5, every=1, killed_at=12, **hooks) is None
    training(tmp_path, 5, every=1, **hooks)
    assert ended == [1, 2]


def test_a_request_in_the_last_epoch_ends_the_program_when_all_is_saved(tmp_path):
    hooks = {"on_end_epoch": lambda state: os.kill(os.getpid(), signal.SIGTERM)}
    with pytest.raises(errors.EndRequested):
        train(torch.nn.Linear(6, 3), loader(), engine=SGDEngine(), checkpoint=tmp_path, **hooks)
    assert listed(tmp_path) == ["step-000007.pt"]


def test_another_network_in_the_same_folder_is_refused(tmp_path):
    network = torch.nn.Linear(6, 3)
    options = {"criterion": loss_of, "iterator": DatasetIterator(samples(), 8), "lr": 0.1}
    SGDEngine().train(network=network, extensions=[Checkpoint(tmp_path)], **options)
    with pytest.raises(errors.CheckpointError, match=r"has trained a different network .*: use one folder"):
        SGDEngine().train(network=torch.nn.Linear(6, 3), maxepoch=2, extensions=[Checkpoint(tmp_path)], **options)
    assert SGDEngine().train(network=network, maxepoch=2, extensions=[Checkpoint(tmp_path)], **options).epoch == 2
