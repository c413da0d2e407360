"""A process killed at each point of a save, and at random moments. In a world of one, where a kill costs a fork.

With TORCHMPI_FAULTS=all (scripts/test_faults) also when there are fewer checkpoints.
"""

import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import time

import dying
import pytest
import torch
from runs import listed

from torchmpi_py.engine import Checkpoints

ALL = os.environ.get("TORCHMPI_FAULTS", "") == "all"
CASES = {  # saved before; then saved under which name, as which step
    "one is replaced and one removed": ([0, 1, 2], 2, 5),
    "one is removed": ([1, 2], 3, 3),
    "one is replaced": ([1, 2], 2, 5),
    "the first": ([], 1, 1),
    "the second": ([1], 2, 2),
}


def content(step):
    return {"model": {"weight": torch.full((3, 2), float(step)), "step": step}, "name": f"step {step}"}


def step_saved(directory):
    """The step of what is resumed from, which is as it was saved; None for nothing."""
    saved = Checkpoints(directory).load()
    if saved is None:
        return None
    model, name = saved.parts["model"], saved.parts["name"]
    assert torch.equal(model["weight"], torch.full((3, 2), float(model["step"])))
    assert name == f"step {model['step']}"
    return model["step"]


def killed_at(point, directory, step, name):
    """Whether a child that loads and saves up to this point was killed there."""
    child = os.fork()
    if child == 0:
        with dying.Points(point):
            checkpoints = Checkpoints(directory, keep=2)
            checkpoints.load()
            checkpoints.save(name, content(step))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.slow)])  # before and after each call
@pytest.mark.parametrize("case", list(CASES) if ALL else list(CASES)[:1])
def test_the_last_complete_one_is_resumed_from(tmp_path, monkeypatch, case, stride):
    before, name, step = CASES[case]
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and not for those who are only killed
    source = tmp_path / "source"
    source.mkdir()
    for former in before:
        Checkpoints(source, keep=3).save(former, content(former))
    seen = []
    for point in itertools.count(0, stride):
        directory = tmp_path / f"{point}"
        shutil.copytree(source, directory)
        if not killed_at(point, directory, step, name):
            break
        seen.append(step_saved(directory))
        Checkpoints(directory, keep=2).save(9, content(9))
        assert step_saved(directory) == 9
        left = listed(directory)
        assert all(re.fullmatch(r"step-\d{6}\.pt", entry) for entry in left), (point, left)
        assert len(left) <= 2, (point, left)
        shutil.rmtree(directory)
    turned = seen.index(step)
    assert seen == [before[-1] if before else None] * turned + [step] * (len(seen) - turned), seen
    assert len(seen) > 14 // stride
    assert turned > 8 // stride


def test_killed_at_random_moments(tmp_path):
    """Whatever is there is whole, and no step that was saved is lost."""
    draw, last, more = random.Random(4), 0, torch.zeros(100_000)  # made here: OpenMP's threads do not survive a fork
    for _ in range(12):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            checkpoints = Checkpoints(tmp_path, keep=2)
            for step in itertools.count(last + 1):
                checkpoints.save(step, content(step) | {"more": more})
                os.write(writer, b"x")
        assert os.read(reader, 1)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writer)
        with open(reader, "rb") as file:
            saved = last + 1 + len(file.read())
        last = step_saved(tmp_path) or 0
        assert last in (saved, saved + 1)
    assert last >= 12


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor):
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("fsync", path.name.partition(".partial")[0]))
        fsync(descriptor)

    def noted_rename(source, target):
        done.append(("rename", pathlib.Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    Checkpoints(tmp_path / "a" / "b").save(1, content(1))
    names = ["a", tmp_path.name, ".step-000001.pt"]
    assert done == [*(("fsync", name) for name in names), ("rename", "step-000001.pt"), ("fsync", "b")]
