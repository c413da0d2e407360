"""Means over samples, on one rank and over all; the progress bar."""

import math
import sys

import pytest
import torch
from runs import classes, loss_of, train

from torchmpi_py.engine import Accuracy, Average, DatasetIterator, SGDEngine, show_progress


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
def test_progress_shows_on_rank_0_and_keeps_hooks(mpi, capsys):
    engine, losses, iterator = SGDEngine(), [], DatasetIterator(classes(21), 4)
    engine.hooks.on_forward_criterion = lambda state: losses.append(state.loss.item())
    show_progress(engine)
    on_end_epoch = engine.hooks.on_end_epoch

    def test_too(state):
        on_end_epoch(state)
        engine.test(network=state.network, criterion=loss_of, iterator=iterator)

    train(torch.nn.Linear(6, 3), iterator, engine=engine, maxepoch=2, on_end_epoch=test_too)
    shown = capsys.readouterr().err
    assert len(losses) == 4 * len(iterator)
    assert ("epoch 2/2" in shown) == ("accuracy" in shown) == ("test" in shown) == (mpi.rank() == 0)


def test_a_bar_without_accuracy(capsys, monkeypatch):
    engine = SGDEngine()
    show_progress(engine)
    train(torch.nn.Linear(1, 1), [(torch.ones(2, 1), torch.ones(2, 1))], engine=engine, lr=0)
    shown = capsys.readouterr().err
    assert "epoch 1/1" in shown
    assert "accuracy" not in shown
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        show_progress(SGDEngine())
