"""Checkpoints in loops of one's own, in a world of one: what they hold, and what is done about damage."""

import os
import pickle
import random

import numpy as np
import pytest
import torch
from runs import listed

from torchmpi_py import errors
from torchmpi_py.engine import Checkpoints, checkpoint_file

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_loop_of_ones_own(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=2)
    assert checkpoints.load() is None
    for step in (1, 5, 12):
        path = checkpoints.save(step, {"model": {"w": torch.full((2,), float(step))}, "text": "x"}, own={"seen": [1]})
    assert path.name == "step-000012.pt"
    drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
    step, parts = Checkpoints(tmp_path / "a" / "b").load()
    assert (step, parts["text"], parts["seen"]) == (12, "x", [1])
    assert torch.equal(parts["model"]["w"], torch.full((2,), 12.0))
    assert drawn == [torch.rand(1).item(), np.random.rand(), random.random()]
    assert listed(tmp_path / "a" / "b") == ["step-000005.pt", "step-000012.pt"]
    assert torch.load(path, weights_only=True)["parts"]["text"] == "x"  # by torch alone
    (tmp_path / "x").touch()
    with pytest.raises(errors.CheckpointError, match=r"/x: Not a directory"):
        Checkpoints(tmp_path / "x").load()
    with pytest.raises(errors.CheckpointError, match=r"/x: File exists"):
        Checkpoints(tmp_path / "x").save(1, {})


def test_a_step_is_replaced_and_an_earlier_one_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"x": 1})
    checkpoints.save(3, {"x": 2})
    assert checkpoints.load() == (3, {"x": 2})
    with pytest.raises(errors.CheckpointError, match="step 3, which is later than 2"):
        checkpoints.save(2, {"x": 3})
    assert listed(tmp_path) == ["step-000003.pt"]


def shorten(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "is cut off": shorten,
    "has another bit": flip,
    "lacks its begin": lambda path: path.write_bytes(path.read_bytes()[100:]),
    "has another content": lambda path: path.write_bytes(b"PK..."),
    "is empty": lambda path: path.write_bytes(b""),
    "is a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_one_is_passed_over(tmp_path, caplog, damage):
    for step in (1, 2):
        path = Checkpoints(tmp_path).save(step, {"x": step})
    DAMAGES[damage](path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() == (1, {"x": 1})
    assert f"{path} is damaged and was skipped" in caplog.text
    assert ("its checksum is wrong" in caplog.text) == (damage != "is a folder")
    checkpoints.save(2, {"x": 5})
    assert listed(tmp_path) == ["step-000001.pt", "step-000002.pt", "step-000002.pt.damaged"]
    assert checkpoints.load() == (2, {"x": 5})


def test_when_all_are_damaged_it_begins_anew(tmp_path):
    shorten(Checkpoints(tmp_path).save(4, {"x": 1}))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    for step in (1, 4, 5):  # what is damaged is forgotten when it is set aside
        checkpoints.save(step, {"x": step})
    assert listed(tmp_path) == ["step-000001.pt", "step-000004.pt", "step-000004.pt.damaged", "step-000005.pt"]


def test_what_another_version_wrote_is_an_error(tmp_path):
    (tmp_path / "step-000007").mkdir()
    for use in (lambda: Checkpoints(tmp_path).load(), lambda: Checkpoints(tmp_path).save(8, {})):
        with pytest.raises(errors.CheckpointError, match=r"step-000007 is a checkpoint of torchmpi_py 0\.1"):
            use()


def test_only_data_is_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    tagged = torch.zeros(3)
    tagged.tag = Tag()
    for value in (lambda: None, np.ones(1), 2**2039, tagged, {1: Tag()}):
        for parts, own in ({"x": {"y": value}}, {}), ({}, {"x": {"y": value}}):
            with pytest.raises(errors.CheckpointError, match=r"\['x'\]\['y'\](\[1\])? is a \w+, which a check"):
                checkpoints.save(1, parts, own=own)
    with pytest.raises(errors.CheckpointError, match=r"\['x'\]\[0\]\['y'\] is a ndarray"):
        checkpoints.save(1, {"x": [{"y": np.ones(1)}]})
    with pytest.raises(errors.CheckpointError, match="step=-1"):
        checkpoints.save(-1, {})
    with pytest.raises(errors.CheckpointError, match=r"parts and own both have \['a'\]"):
        checkpoints.save(1, {"a": 1}, own={"a": 1})
    assert checkpoints.load() is None


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_file_that_would_run_code_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_file, "packed", lambda content: bytearray(pickle.dumps(Bomb())))
        Checkpoints(tmp_path / "c").save(1, {"x": 1})
    with pytest.raises(errors.CheckpointError, match=r"UserWarning: Detected pickle protocol|UnpicklingError"):
        Checkpoints(tmp_path / "c").load()
    assert os.listdir(tmp_path) == ["c"]


class Tag:
    """What no file of plain data holds."""


def test_values_come_back_as_they_were(tmp_path):
    tensor, versions = torch.zeros(3, requires_grad=True), torch.nn.BatchNorm1d(2).state_dict()
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    numbers = [np.float64(2), torch.zeros(10**5)[:3]]  # of a part of a tensor the rest is not written
    file = Checkpoints(tmp_path).save(
        1, {"p": parameter, "views": [tensor, tensor.detach()], "m": versions, "n": numbers}
    )
    assert file.stat().st_size < 10**5
    parts = Checkpoints(tmp_path).load().parts
    assert parts["n"][0] == 2
    assert (type(parts["p"]), parts["p"].requires_grad) == (torch.nn.Parameter, False)
    assert parts["views"][0].data_ptr() == parts["views"][1].data_ptr()
    assert parts["m"]._metadata == versions._metadata


def test_an_old_one_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    def refusing(path, missing_ok=False):
        raise OSError(16, "Device or resource busy")

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": 1})
    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "unlink", refusing)
        checkpoints.save(2, {"x": 2})
    assert "step-000001.pt cannot be removed" in caplog.text
    checkpoints.save(3, {"x": 3})
    assert listed(tmp_path) == ["step-000003.pt"]
