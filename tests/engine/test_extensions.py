"""Extensions: when they are called, and the keywords of before."""

import sys
import types

import pytest
import torch
from runs import listed, loss_of, train

from torchmpi_py.engine import (
    Checkpoint,
    Checkpoints,
    EpochLines,
    Evaluate,
    Extension,
    SGDEngine,
    TensorBoard,
    checkpoint,
)


def samples():
    return [(torch.ones(2, 3), torch.tensor([0, 1]))] * 2


def trained(**options):
    return train(torch.nn.Linear(3, 2), samples(), engine=SGDEngine(), **options)


class Noting(Extension):
    """Notes what happens, with its name."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def around_run(self, engine, state):
        return self

    def around_epoch(self, state):
        return self

    def __enter__(self):
        self.calls.append((self.name, "enter"))

    def __exit__(self, *_):
        self.calls.append((self.name, "exit"))

    def on_update(self, state):
        self.calls.append((self.name, state.t))


def test_hooks_come_first_and_extensions_in_their_order():
    calls = []
    trained(
        extensions=[Noting("a", calls), Noting("b", calls)], on_update=lambda state: calls.append(("hook", state.t))
    )
    enter, leave = [("a", "enter"), ("b", "enter")], [("b", "exit"), ("a", "exit")]
    steps = [(name, t) for t in (1, 2) for name in ("hook", "a", "b")]
    assert calls == [*enter, *enter, *steps, *leave, *leave]


def test_brackets_end_also_where_an_error_ends_training():
    calls = []
    with pytest.raises(ZeroDivisionError):
        trained(extensions=[Noting("a", calls)], on_sample=lambda state: 1 / 0)
    assert calls == [("a", "enter")] * 2 + [("a", "exit")] * 2


def test_a_class_with_a_misspelt_moment_is_refused():
    with pytest.raises(TypeError, match="on_updates is not a hook"):
        type("Mine", (Extension,), {"on_updates": print})
    with pytest.raises(TypeError, match="class derived from Extension"):
        trained(extensions=[print])


class Count(Extension):
    """Count epochs; a meter that a checkpoint keeps."""

    def __init__(self):
        self.epochs = 0

    def on_end_epoch(self, state):
        self.epochs += 1
        state.maxepoch = min(state.maxepoch, 3)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


def test_checkpoints_are_saved_after_what_the_others_do(tmp_path):
    """Wherever they stand in the list: also a stop by another extension, which ends training for good."""
    for maxepoch, expected in ((2, 2), (5, 3), (5, 3)):
        count, network = Count(), torch.nn.Linear(3, 2)
        extensions = [Checkpoint(tmp_path, every=100, stateful={"count": count}), count]
        checkpoint.completed.clear()
        options = {"network": network, "criterion": loss_of, "iterator": samples(), "lr": 0.1}
        assert SGDEngine().train(maxepoch=maxepoch, extensions=extensions, **options).epoch == expected
        assert count.epochs == expected


def test_extensions_of_training_alone_are_refused_in_a_test(tmp_path):
    with pytest.raises(TypeError, match="EpochLines works only in training"):
        SGDEngine().test(network=torch.nn.Linear(3, 2), criterion=loss_of, iterator=[], extensions=[EpochLines()])


def test_former_keywords_build_the_extension_and_name_it(tmp_path, capsys):
    def run(**options):
        network = torch.nn.Linear(3, 2)
        SGDEngine().train(network=network, criterion=loss_of, iterator=samples(), lr=0.1, **options)

    epochs = []
    with pytest.warns(DeprecationWarning, match="is deprecated") as warned:
        run(checkpoint=tmp_path, every=1, keep=2, evaluator=lambda network, epoch: epochs.append(epoch))
    said = [str(each.message) for each in warned]
    assert all(each.filename == __file__ for each in warned)
    for words in ("Checkpoint(folder)", "Checkpoint(folder, every=...)", "Evaluate(function)"):
        assert any(words in text for text in said)
    assert (epochs, len(listed(tmp_path)), Checkpoints(tmp_path).load().step) == ([1], 2, 2)
    assert "epoch 1/1" in capsys.readouterr().out
    with pytest.warns(DeprecationWarning, match=r"extensions=\[\] for no lines"):
        run(epoch_lines=False)
    assert capsys.readouterr().out == ""
    with (
        pytest.warns(DeprecationWarning, match="is deprecated"),
        pytest.raises(ValueError, match=r"Checkpoint\(folder, stateful="),
    ):
        run(stateful={"a": Evaluate(print)})
    with pytest.raises(TypeError, match="unexpected keyword argument 'maxepochs'"):
        run(maxepochs=2)


def test_tensorboard_gets_the_losses(monkeypatch, tmp_path):
    class SummaryWriter:
        def __init__(self, folder):
            self.folder, self.rows = folder, []

        def add_scalar(self, *row):
            self.rows.append(row)

        def flush(self):
            self.rows.append("flushed")

    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    losses, board = [], TensorBoard(tmp_path)
    trained(extensions=[board], on_update=lambda state: losses.append(state.loss.item()))
    assert board.writer.rows == [*(("loss", loss, t) for t, loss in enumerate(losses, 1)), "flushed"]
    assert board.writer.folder == str(tmp_path)
