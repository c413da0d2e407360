"""The folder of a sweep, the table of its results, and the rule by which experiments are stopped."""

import contextlib
import csv
import errno
import math
import multiprocessing
import os
import pathlib
import shutil
import threading

import numpy as np
import pytest
import torch

from torchmpi_py.errors import TorchMPIError
from torchmpi_py.sweeps import ledger as ledgers, progress, successive_halving
from torchmpi_py.sweeps.ledger import Ledger
from torchmpi_py.sweeps.outcome import FAILED, FINISHED, STOPPED, Experiment, Results


def row(number, value, configuration=None, state=FINISHED, error=""):
    return Experiment(number, configuration or {"lr": 0.1 * number}, state, value, error, 1.5, 0.0, number, 0, "log")


def prepared(folder, token="a", group=0, configurations=range(6), **options):
    ledger = Ledger(folder, token, group)
    ledger.prepare(list(configurations), 0, **{"resume": True, **options})
    return ledger


def claim_all(folder, group, found):
    ledger = Ledger(folder, "a", group)
    ledger.join()
    while (number := ledger.claim()) is not None:
        found.put(number)


def test_each_experiment_is_claimed_once(tmp_path):
    prepared(tmp_path, configurations=range(60))
    found = multiprocessing.Queue()
    groups = [multiprocessing.Process(target=claim_all, args=(tmp_path, group, found)) for group in range(3)]
    for each in groups:
        each.start()
    claimed = [found.get(timeout=200) for _ in range(60)]
    for each in groups:
        each.join()
    assert sorted(claimed) == list(range(60))
    assert found.empty()


def test_a_claim_that_succeeds_and_reports_the_opposite_is_one(tmp_path, monkeypatch):
    """As on NFS when the answer is lost."""

    def link(source, target, link=os.link):
        link(source, target)
        raise FileExistsError

    ledger, other = prepared(tmp_path), prepared(tmp_path, group=1)
    assert ledger.claim() == 0
    monkeypatch.setattr(os, "link", link)
    assert other.claim() == 1
    assert not list(tmp_path.glob("part-*"))


def test_what_was_under_way_is_run_again_in_another_run_and_abandoned_in_this_one(tmp_path):
    first = prepared(tmp_path)
    assert [first.claim() for _ in range(3)] == [0, 1, 2]
    first.end(row(0, 1.0))
    first.end(row(2, 1.0))
    again = Ledger(tmp_path, "a", 0)
    assert again.prepare(list(range(6)), 0, resume=True) == 0  # the same run: this group was started again
    assert [number for number, _ in again.abandoned()] == [1]
    assert Ledger(tmp_path, "a", 1).abandoned() == []
    assert again.claim() == 3
    later = Ledger(tmp_path, "b", 0)
    assert later.prepare(list(range(6)), 0, resume=True) == 2
    assert later.abandoned() == []
    assert [later.claim() for _ in range(5)] == [1, 3, 4, 5, None]


def test_reports_of_an_experiment_that_is_run_again_are_gone(tmp_path):
    first = prepared(tmp_path)
    first.claim()
    first.add_report(0, 1, 0.5)
    first.log(0).write_text("printed")
    second = prepared(tmp_path, "b")
    assert second.reports() == {0: {1: 0.5}}
    second.claim()
    assert (second.reports(), second.log(0).exists()) == ({}, False)


def test_another_sweep_is_refused(tmp_path):
    first = prepared(tmp_path, configurations=[{"lr": 1}, {"lr": 2}])
    for configurations, words in (
        ([{"lr": 1}, {"lr": 3}], r"configuration 1 was \{'lr': 2\}, and is now \{'lr': 3\}; pass resume=False"),
        ([{"lr": 1}], "a sweep of 2 configurations with seed=0, but this sweep has 1 "),
    ):
        with pytest.raises(ValueError, match=words):
            prepared(tmp_path, "b", configurations=configurations)
    for number in range(2):
        first.end(row(number, 1.0))
    with pytest.raises(ValueError, match="a sweep with different configurations"):
        prepared(tmp_path, "c", configurations=["another", "one"])
    assert prepared(tmp_path, "d", configurations=[{"lr": 1}, {"lr": 2}]).num_ended() == 2
    assert prepared(tmp_path, "e", configurations=[1, 2, 3], resume=False).claim() == 0
    assert not list(tmp_path.glob("*-[acd]"))


def test_arrays_are_compared_whole(tmp_path):
    def again(token):
        return prepared(tmp_path, token, configurations=[{"a": array.copy(), "b": torch.zeros(3)}])

    array = np.zeros(10_000)
    again("a")
    assert again("b").claim() == 0
    array[5000] = 1  # numpy prints the same
    with pytest.raises(ValueError, match="with different configurations"):
        again("c")


def test_files_that_are_not_the_sweeps_stay(tmp_path):
    for name in ("run-all.sh", "results.csv", "2024-notes.log"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match="is neither empty nor the folder of a sweep"):
        prepared(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    prepared(tmp_path / "own").claim()
    own = tmp_path / "own"
    for name in ("run-all.sh", "2024-notes.log", "part-of-it", "2024.log"):
        (own / name).write_text("mine")
    for name in ("2024", "0000"):  # the second one is that of an experiment
        (own / name).mkdir()
    prepared(own, "b", configurations=[1], resume=False)
    assert len([path for path in own.iterdir() if path.is_file() and path.read_bytes() == b"mine"]) == 4
    assert (own / "2024").exists()
    assert not (own / "0000").exists()


@pytest.mark.parametrize("num_removed", range(7))
def test_a_new_sweep_that_is_killed_while_it_clears_the_folder_may_begin_again(tmp_path, monkeypatch, num_removed):
    first = prepared(tmp_path)
    first.end(row(first.claim(), 1.0))
    for number in range(2):
        first.own_folder(number).mkdir()
    assert first.claim() == 1
    removed, remove_folder = [], shutil.rmtree

    def remove(path):
        if len(removed) == num_removed:
            raise KeyboardInterrupt
        removed.append(path)
        (remove_folder if path.is_dir() else os.unlink)(path)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(pathlib.Path, "unlink", remove)
        patch.setattr(shutil, "rmtree", remove)
        prepared(tmp_path, "b", configurations=[1, 2], resume=False)
    again = prepared(tmp_path, "c", configurations=[1, 2], resume=False)
    assert (again.num_ended(), again.claim()) == (0, 0)
    assert not any(again.own_folder(number).exists() for number in range(2))


def test_who_joins_waits_for_the_chief(tmp_path, monkeypatch):
    monkeypatch.setattr(ledgers, "PREPARED_SECONDS", 0.3)
    with pytest.raises(TorchMPIError, match=r"no sweep was prepared in .*; pass the same shared folder"):
        Ledger(tmp_path, "a", 1).join()


def test_table_and_csv(tmp_path):
    failed = row(2, None, "plain", FAILED, "ValueError: bad\nvalue, of course")
    results = Results([row(0, {"accuracy": 0.5, "lr": 7}), row(1, {"accuracy": math.nan}), failed, row(3, 12.0)])
    results.to_csv(tmp_path / "results.csv")
    with open(tmp_path / "results.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [read[0][name] for name in ("accuracy", "lr", "value.lr")] == ["0.5", "0.0", "7"]
    assert [read[2][name] for name in ("configuration", "error")] == ["plain", failed.error]
    assert read[3]["value"] == "12.0"
    lines = str(results).splitlines()
    assert len(lines) == 6
    assert len({len(line) for line in lines}) == 1
    assert str(Results()) == "no experiments"


def test_best():
    losses = [math.nan, 3.0, 1.0]
    results = Results([*(row(i, {"loss": loss}) for i, loss in enumerate(losses)), row(3, None, state=FAILED)])
    assert results.best("loss").number == 1
    assert results.best("loss", largest=False).number == 2
    assert results.best(lambda value: -value["loss"]).number == 2
    for none in (results[:1], results[3:]):
        with pytest.raises(ValueError, match="no experiment of 1 has a value to compare"):
            Results(none).best("loss")
    stopped = Results([row(0, {"loss": 3.0}), row(1, 0.5, state=STOPPED)])  # its last report, a number
    assert [stopped.best(key).number for key in ("loss", lambda value: value["loss"])] == [0, 0]
    assert Results([row(0, 0.1), *stopped[1:]]).best().number == 1
    with pytest.raises(KeyError):
        stopped.best("accuracy")  # a mistake


def test_successive_halving():
    stop = successive_halving(first_step=2, factor=3)
    others = [{2: 0.1 * i, 6: 0.1 * i} for i in range(5)]  # 0 .. 0.4
    assert not stop({1: 0.0}, others)
    assert not stop({2: 0.35}, others)  # the second of six, and two go on
    assert stop({2: 0.25}, others)
    assert not stop({2: 0.25, 3: 0.0}, others)  # no rung
    assert stop({2: 0.5, 6: 0.25}, others)
    assert not stop({18: -5.0}, others)  # the first to come there
    assert stop({2: math.nan}, others)
    assert not stop({2: 0.35}, [{2: math.nan}, *others])
    assert successive_halving(2, 3, largest=False)({2: 0.35}, others)
    with pytest.raises(ValueError, match="factor=1"):
        successive_halving(factor=1)


@pytest.mark.parametrize("until", ["then", "the end"])
def test_the_table_of_a_disk_that_was_full(tmp_path, monkeypatch, until):
    """It follows again when there is room; an error that lasts is raised at the end."""
    ledger, full, write = prepared(tmp_path), threading.Event(), Results.to_csv
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.01)

    def written(self, path):
        if not full.is_set() or until == "the end":
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, path)

    monkeypatch.setattr(Results, "to_csv", written)
    ends = pytest.raises(OSError, match="No space") if until == "the end" else contextlib.nullcontext()
    with ends, progress.Progress(ledger, 0, bar=False):
        ledger.end(row(3, 0.5))
        assert full.wait(100)
    assert (tmp_path / "results.csv").exists() == (until == "then")
