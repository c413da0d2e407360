"""Means over samples, on one rank and over all; the progress bar, and the line after each epoch."""

import math
import re
import sys

import pytest
import torch
from runs import classes, listed, loss_of, train

from torchmpi_py.engine import Accuracy, Average, DatasetIterator, EpochLines, ProgressBar, SGDEngine
from torchmpi_py.runtime import chief, process


def test_average_weights_by_samples():
    average = Average()
    assert math.isnan(average.value)
    average.add(1.0, 3)
    average.add(torch.tensor(5.0, requires_grad=True), 1)
    average.add(math.inf, 0)
    assert average.value == 2.0
    average.reset()
    assert math.isnan(average.value)


def test_accuracy_counts_the_first_samples():
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    accuracy = Accuracy()
    accuracy.add(scores, torch.tensor([1, 0, 0]))
    assert accuracy.value == pytest.approx(2 / 3)
    accuracy.add(scores, torch.tensor([1, 0, 0]), 1)
    assert accuracy.value == pytest.approx(3 / 4)
    accuracy.add(scores, torch.tensor([0, 1, 1]), 0)
    assert accuracy.value == pytest.approx(3 / 4)
    dense = Accuracy()
    dense.add(torch.eye(3).expand(2, 3, 3), torch.tensor([[0, 1, 2], [0, 0, 0]]))
    assert dense.value == pytest.approx(4 / 6)


@pytest.mark.parametrize("target", [torch.zeros(2), torch.zeros(3, 2), torch.zeros(3, 1)])
def test_accuracy_refuses_shapes_that_do_not_fit(target):
    with pytest.raises(ValueError, match="shape"):
        Accuracy().add(torch.zeros(3, 2), target)


@pytest.mark.mpi
def test_reduced_is_exact_with_uneven_ranks(mpi):
    average = Average()
    for i in range(mpi.rank()):  # rank 0 has none
        average.add(10.0 * mpi.rank() + i)
    values = [10.0 * rank + i for rank in range(mpi.size()) for i in range(rank)]
    expected = sum(values) / len(values) if values else math.nan
    assert average.reduced() == pytest.approx(expected, nan_ok=True)


@pytest.mark.mpi
def test_progress_shows_on_rank_0(mpi, capsys):
    engine, iterator, bar = SGDEngine(), DatasetIterator(classes(21), 4), ProgressBar()

    def test_too(state):
        engine.test(network=state.network, criterion=loss_of, iterator=iterator, extensions=[bar])

    options = {"maxepoch": 2, "on_end_epoch": test_too, "extensions": [bar]}
    train(torch.nn.Linear(6, 3), iterator, engine=engine, **options)
    shown = capsys.readouterr().err
    assert ("epoch 2/2" in shown) == ("accuracy" in shown) == ("test" in shown) == (mpi.rank() == 0)


def test_a_bar_without_accuracy(capsys, monkeypatch):
    sample = torch.ones(2, 1), torch.ones(2, 1)
    train(torch.nn.Linear(1, 1), [sample], engine=SGDEngine(), lr=0, extensions=[ProgressBar()])
    shown = capsys.readouterr().err
    assert "epoch 1/1" in shown
    assert "accuracy" not in shown
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        ProgressBar()


def trained(engine=None, **options):
    samples = [(torch.full((n, 2), float(n)), torch.zeros(n, 1)) for n in (1, 3)]
    train(torch.nn.Linear(2, 1), samples, engine=engine or SGDEngine(), lr=0.01, maxepoch=2, **options)


def losses(capsys):
    """Return the loss of each epoch from the lines, which are all that was printed."""
    pattern = r"epoch (\d)/2: loss (\d+\.\d{4}), 2 steps, \d+\.\d s"
    matches = [re.fullmatch(pattern, line) for line in capsys.readouterr().out.splitlines()]
    return {int(match[1]): float(match[2]) for match in matches}


def test_a_line_has_the_mean_over_the_samples_of_the_epoch(capsys, tmp_path):
    """Also where checkpoints are saved."""
    loss = [Average(), Average()]
    hooks = {"on_forward_criterion": lambda state: loss[state.epoch].add(state.loss, state.num_samples)}
    trained(checkpoint=tmp_path, extensions=[EpochLines()], **hooks)
    assert losses(capsys) == {epoch: pytest.approx(each.value, abs=6e-5) for epoch, each in enumerate(loss, 1)}
    assert len(listed(tmp_path)) == 2


def test_what_takes_the_place_of_a_line(capsys):
    epochs = []
    trained(extensions=[])
    trained(on_end_epoch=lambda state: epochs.append(state.epoch))
    assert (epochs, capsys.readouterr().out) == ([1, 2], "")


def test_the_rank_that_is_chief_when_the_epoch_ends_writes_the_line(capsys, monkeypatch):
    """As after a recovery in which rank 0 died."""
    monkeypatch.setattr(process, "is_started", lambda: True)
    ranks = iter([False, True])
    monkeypatch.setattr(chief, "is_chief", lambda: next(ranks))
    trained()
    assert list(losses(capsys)) == [2]


@pytest.mark.mpi(min_size=2)
def test_rank_0_alone_writes_the_line(mpi, capsys):
    trained()
    assert sorted(losses(capsys)) == ([1, 2] if mpi.rank() == 0 else [])
