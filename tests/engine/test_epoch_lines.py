"""The line of the engine after each epoch."""

import re

import pytest
import torch
from runs import listed, train

from torchmpi_py.engine import AllReduceSGDEngine, Average, SGDEngine, show_progress
from torchmpi_py.runtime import chief, process


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
    trained(checkpoint=tmp_path, **hooks)
    assert losses(capsys) == {epoch: pytest.approx(each.value, abs=6e-5) for epoch, each in enumerate(loss, 1)}
    assert len(listed(tmp_path)) == 2


def test_what_takes_its_place(capsys):
    epochs = []
    trained(epoch_lines=False)
    trained(on_end_epoch=lambda state: epochs.append(state.epoch))
    trained(on_end_epoch=lambda state: None, evaluator=lambda network, epoch: None)
    engine = SGDEngine()
    show_progress(engine)
    trained(engine)
    assert (epochs, capsys.readouterr().out) == ([1, 2], "")
    trained(evaluator=lambda network, epoch: epochs.append(epoch))  # an evaluator alone does not
    assert (epochs, sorted(losses(capsys))) == ([1, 2, 1, 2], [1, 2])


def test_the_rank_that_is_chief_when_the_epoch_ends_writes_it(capsys, monkeypatch):
    """As after a recovery in which rank 0 died."""
    monkeypatch.setattr(process, "is_started", lambda: True)
    ranks = iter([False, True])
    monkeypatch.setattr(chief, "is_chief", lambda: next(ranks))
    trained()
    assert list(losses(capsys)) == [2]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{}, {"evaluator": lambda network, epoch: None}], ids=["alone", "evaluator"])
def test_rank_0_alone_writes_it(mpi, capsys, options):
    trained(AllReduceSGDEngine() if options else None, **options)
    assert sorted(losses(capsys)) == ([1, 2] if mpi.rank() == 0 else [])
