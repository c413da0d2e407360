"""The line of the engine after each epoch."""

import re

import pytest
import torch
from checkpoint_folder import listed

from torchmpi_py.engine import AllReduceSGDEngine, Average, SGDEngine, show_progress
from torchmpi_py.runtime import chief, process


def train(engine=None, **options):
    engine = engine or SGDEngine()
    network = torch.nn.Linear(2, 1)
    samples = [(torch.full((n, 2), float(n)), torch.zeros(n, 1)) for n in (1, 3)]
    given = {"iterator": samples, "lr": 0.01, "maxepoch": 2} | options
    engine.train(network=network, criterion=torch.nn.functional.mse_loss, **given)


def losses(output):
    """Of the lines, which are nothing else."""
    pattern = r"epoch (\d)/2: loss (\d+\.\d{4}), 2 steps, \d+\.\d s"
    return {
        int(epoch): float(loss)
        for epoch, loss in (re.fullmatch(pattern, line).groups() for line in output.splitlines())
    }


def test_a_line_has_the_mean_over_the_samples_of_the_epoch(capsys):
    engine, loss = SGDEngine(), [Average(), Average()]
    engine.hooks.on_forward_criterion = lambda state: loss[state.epoch].add(state.loss, state.num_samples)
    train(engine)
    means = {epoch: pytest.approx(each.value, abs=6e-5) for epoch, each in enumerate(loss, 1)}
    assert losses(capsys.readouterr().out) == means


def test_it_can_be_left_out(capsys):
    train(epoch_lines=False)
    assert capsys.readouterr().out == ""


def test_a_hook_takes_its_place(capsys):
    engine = SGDEngine()
    epochs = []
    engine.hooks.on_end_epoch = lambda state: epochs.append(state.epoch)
    train(engine)
    assert (epochs, capsys.readouterr().out) == ([1, 2], "")


def test_a_bar_takes_its_place(capsys):
    pytest.importorskip("tqdm")
    engine = SGDEngine()
    show_progress(engine)
    train(engine)
    assert capsys.readouterr().out == ""


def test_an_evaluator_does_not_take_its_place(capsys):
    evaluated = []
    train(evaluator=lambda network, epoch: evaluated.append(epoch))
    assert (evaluated, sorted(losses(capsys.readouterr().out))) == ([1, 2], [1, 2])


def test_a_hook_takes_its_place_beside_an_evaluator(capsys):
    engine = SGDEngine()
    engine.hooks.on_end_epoch = lambda state: None
    train(engine, evaluator=lambda network, epoch: None)
    assert capsys.readouterr().out == ""


def test_the_rank_that_is_chief_when_the_epoch_ends_writes_it(capsys, monkeypatch):
    """As after a recovery in which rank 0 died."""
    monkeypatch.setattr(process, "is_started", lambda: True)
    ranks = iter([False, True])
    monkeypatch.setattr(chief, "is_chief", lambda: next(ranks))
    train()
    assert list(losses(capsys.readouterr().out)) == [2]


def test_checkpoints_are_saved_beside_it(capsys, tmp_path):
    train(checkpoint=tmp_path)
    assert sorted(losses(capsys.readouterr().out)) == [1, 2]
    assert len(listed(tmp_path)) == 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{}, {"evaluator": lambda network, epoch: None}], ids=["alone", "evaluator"])
def test_rank_0_alone_writes_it(mpi, capsys, options):
    train(AllReduceSGDEngine() if options else None, **options)
    assert sorted(losses(capsys.readouterr().out)) == ([1, 2] if mpi.rank() == 0 else [])
