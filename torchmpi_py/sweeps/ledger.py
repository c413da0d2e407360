"""The folder of a sweep: which experiments there are, who takes which, and how each ended.

Groups of ranks, of one job or of several, share the experiments by way of files alone, so that a group that dies takes
nothing with it, and a sweep that was killed goes on where it was. Every file appears whole, by renaming, or by a link
to a name that no other process has linked, which holds on network file systems too::

    torchmpi-sweep      the configurations and the seed
    run-TOKEN           a run of the sweep has begun; TOKEN is the same for all groups of the run
    claims-TOKEN/0007   experiment 7 was taken in this run, and by which group
    ended-0007          how experiment 7 ended (`outcome.Experiment`)
    reports-0007        values that it has reported, a line each: step and value
    0007.log            what it printed
    0007/               files of its own (`experiment_folder`)
    results.csv         all that have ended

Configurations and values are any objects that can be pickled, and to unpickle a file may run code. So the files are
read only if they belong to the user or to root, and files of another user are neither removed nor written to.

A claim without an end is an experiment under way, or one that was under way when its group died. In a later run, with
another token, nobody has claimed it. The *chief*, the first group of a run, prepares the folder; the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from torchmpi_py import trusted_files
from torchmpi_py.errors import TorchMPIError
from torchmpi_py.sweeps.outcome import FAILED, Experiment, Results

PREPARED_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_SWEEP = "torchmpi-sweep"
_OWN = re.compile(r"results\.csv|(run|claims)-[0-9a-f-]+|(ended|reports)-\d{4,}|part-.+-[a-z0-9_]{8}")
_MOST_BYTES = 1 << 30  # of a file
_REMEDY = "remove it, or name another folder with directory="


class Ledger:
    """The files of the sweep in ``folder``, for one group of the run ``token``."""

    def __init__(self, folder: Path, token: str, group: int) -> None:
        self.folder, self.token, self.group = folder, token, group
        self.configurations: Sequence[Any] = ()
        self.seed = 0

    @property
    def _run(self) -> Path:
        return self.folder / f"run-{self.token}"

    @property
    def _claims(self) -> Path:
        return self.folder / f"claims-{self.token}"

    # --- the chief, and the others

    def prepare(self, configurations: Sequence[Any], seed: int, *, resume: bool) -> int:
        """Begin a run: of a new sweep, or of the one in the folder; how many of its experiments have ended already.

        ValueError where the folder holds a sweep of other configurations, or something else. A group that was started
        again joins.
        """
        if self._run.exists():
            self.join()
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep = self.folder / _SWEEP
        if not sweep.exists() and any(not path.name.startswith(f"part-{_SWEEP}") for path in self.folder.iterdir()):
            raise ValueError(f"{self.folder} is no folder of a sweep, and not empty: name another one with directory=")
        trusted_files.refuse_others(sweep, _REMEDY)
        former = _read(sweep) if resume and sweep.exists() else None
        if former is None:
            self._clear()
            self._write(_SWEEP, pickle.dumps((list(configurations), seed)))
        else:
            _check_same(self.folder, former, (list(configurations), seed))
        self._claims.mkdir(exist_ok=True)
        self._write(self._run.name, b"")
        self.configurations, self.seed = configurations, seed
        return 0 if former is None else len(self.results())

    def join(self) -> None:
        """Take part in the run that the chief has begun; TorchMPIError if it has not, after `PREPARED_SECONDS`."""
        deadline = time.monotonic() + PREPARED_SECONDS
        while not self._run.exists():
            if time.monotonic() > deadline:
                raise TorchMPIError(
                    f"no sweep was prepared in {self.folder} within {PREPARED_SECONDS:g} s: the folder must be the "
                    "same on all hosts (directory=), and every group must call mpi.experiments"
                )
            time.sleep(_LOOK_SECONDS)
        self.configurations, self.seed = _read(self.folder / _SWEEP)

    def _clear(self) -> None:
        """Remove what a former sweep has left, and nothing else.

        The claims, which tell an experiment's folder from another one, go last: this may be killed. The file of the
        sweep stays, by which the folder is known, until another one takes its place.
        """
        claimed = {path.name for path in self.folder.glob("claims-*/*") if _OWN.fullmatch(path.parent.name)}
        paths = [path for path in self.folder.iterdir() if path.name.removesuffix(".log") in claimed]
        paths += [path for path in self.folder.iterdir() if _OWN.fullmatch(path.name)]
        for path in sorted(filter(trusted_files.is_own, paths), key=lambda path: path.name.startswith("claims-")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    # --- experiments

    def claim(self) -> int | None:
        """Take the first experiment that no group has; None if there is none left."""
        for number in range(len(self.configurations)):
            if (self.folder / f"ended-{number:04}").exists():
                continue
            # Of all groups that link their file to the name of the claim, one succeeds.
            part = self._part(f"claim-{number:04}", str(self.group).encode())
            try:
                os.link(part, self._claims / f"{number:04}")
            except FileExistsError:
                # NFS says this of a success as well, where its answer was lost and the call was repeated.
                if part.stat().st_nlink == 1:
                    continue
            finally:
                part.unlink()
            # An earlier run of the experiment, which did not end, has left these.
            for former in (self.log(number), self._reports(number)):
                trusted_files.refuse_others(former, _REMEDY)
                former.unlink(missing_ok=True)
            return number
        return None

    def abandoned(self) -> list[tuple[int, float]]:
        """The experiments that this group has taken in this run, and not ended; and when each was taken."""
        taken = [path for path in self._claims.iterdir() if _read_text(path) == str(self.group)]
        left = [path for path in taken if not (self.folder / f"ended-{path.name}").exists()]
        return sorted((int(path.name), path.stat().st_mtime) for path in left)

    def end(self, row: Experiment) -> None:
        """Record how an experiment ended."""
        try:
            packed = pickle.dumps(row)
        except Exception as error:  # what an object's own methods raise
            text = f"its value cannot be pickled: {type(error).__name__}: {error}"
            row = dataclasses.replace(row, state=FAILED, value=None, error=text)
            packed = pickle.dumps(row)
        self._write(f"ended-{row.number:04}", packed)

    def num_ended(self) -> int:
        """How many experiments have ended, in this run or before."""
        return len(list(self.folder.glob("ended-*")))

    def is_over(self) -> bool:
        """Whether all experiments have ended."""
        return self.num_ended() >= len(self.configurations)

    def results(self, known: Iterable[Experiment] = ()) -> Results:
        """The experiments that have ended; ``known`` ones are not read again."""
        rows = {f"ended-{row.number:04}": row for row in known}
        rows |= {path.name: _read(path) for path in self.folder.glob("ended-*") if path.name not in rows}
        return Results(sorted(rows.values(), key=lambda row: row.number))

    def own_folder(self, number: int) -> Path:
        """The folder for files of one experiment, which need not exist."""
        return self.folder / f"{number:04}"

    def _part(self, name: str, content: bytes) -> Path:
        """Write a new file, which is to get this name."""
        descriptor, path = tempfile.mkstemp(prefix=f"part-{name}-", dir=self.folder)
        with open(descriptor, "wb") as file:
            file.write(content)
        return Path(path)

    def _write(self, name: str, content: bytes) -> None:
        self._part(name, content).replace(self.folder / name)

    def log(self, number: int) -> Path:
        """The file for the output of an experiment."""
        return self.folder / f"{number:04}.log"

    # --- reports

    def _reports(self, number: int) -> Path:
        return self.folder / f"reports-{number:04}"

    def add_report(self, number: int, step: int, value: float) -> None:
        """Record a value of an experiment under way."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(trusted_files.open_file(self._reports(number), flags, remedy=_REMEDY), "a") as file:
            file.write(f"{json.dumps([step, value])}\n")

    def reports(self) -> dict[int, dict[int, float]]:
        """By experiment, the values reported by step; of all that have reported any."""
        found: dict[int, dict[int, float]] = {}
        for path in self.folder.glob("reports-*"):
            with contextlib.suppress(FileNotFoundError):
                lines = _read_text(path).split("\n")[:-1]  # the last may be under way
                found[int(path.name.removeprefix("reports-"))] = dict(map(json.loads, lines))
        return found


def _read(path: Path) -> Any:
    """The object in a file. OSError for a file of another user, ValueError for one without a pickle."""
    content = trusted_files.read(path, _MOST_BYTES, remedy=_REMEDY)
    try:
        return pickle.loads(content)
    except Exception as error:  # a broken pickle raises any
        raise ValueError(f"{path} is not a file of a sweep ({type(error).__name__}: {error}); {_REMEDY}") from error


def _read_text(path: Path) -> str:
    return trusted_files.read(path, _MOST_BYTES, remedy=_REMEDY).decode()


def _check_same(folder: Path, former: tuple[list[Any], int], now: tuple[list[Any], int]) -> None:
    remedy = "resume=False begins again, and another directory= leaves that one alone"
    if len(former[0]) != len(now[0]) or former[1] != now[1]:
        was, is_now = (f"{len(listed)} configurations with seed={seed}" for listed, seed in (former, now))
        raise ValueError(f"{folder} holds a sweep of {was}, and this one has {is_now}; {remedy}")
    for number, (one, other) in enumerate(zip(former[0], now[0], strict=True)):
        if not _is_same(one, other):
            what = f"configuration {number} was {one!r}, and is {other!r}"
            raise ValueError(f"{folder} holds a sweep of other configurations: {what}; {remedy}")


def _is_same(one: Any, other: Any) -> bool:
    """Whether two configurations are equal, the arrays and tensors in them as a whole."""
    (leaves, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec == other_spec and all(map(_is_same_leaf, leaves, others))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    # An object of the user's may have no equality of its own.
    return bool(one == other) or pickle.dumps(one) == pickle.dumps(other)
