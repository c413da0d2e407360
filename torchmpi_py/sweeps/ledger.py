"""The folder of a sweep: the experiments, the group that runs each of them, and their outcomes.

Groups of ranks, in one job or in several, share the experiments only through files. The death of a group therefore does
not affect other groups, and a sweep that was killed can resume. If rank 0 served the configurations instead, the death
of rank 0 would end the sweep. A file gets its name only when it is complete, by renaming or by a hard link, which also
works on network file systems. Only logs and reports grow under their final names::

    torchmpi-sweep      the configurations and the seed
    run-TOKEN           a run of the sweep has started; TOKEN is the same for all groups of the run
    claims-TOKEN/0007   the group that has claimed experiment 7 in this run
    ended-0007          the outcome of experiment 7 (`outcome.Experiment`)
    reports-0007        the values that experiment 7 has reported, one (step, value) per line
    0007.log            the output of experiment 7
    0007/               the files of experiment 7 (`experiment_folder`)
    results.csv         all experiments that have ended

Configurations and values are arbitrary objects that can be pickled, and unpickling a file may run code. So the ledger
reads a file only if it belongs to the user or to root, and neither removes nor writes files of another user.

A claim without an outcome means that the experiment is running, or was running when its group died. A later run has
another token, and therefore no claims. Rank 0 of the first group of a run prepares the folder. All other ranks wait.
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
_MOST_BYTES = 1 << 30  # maximum size of a file that is read, in bytes
_REMEDY = "pass another folder as directory="


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

    # --- the start of a run

    def prepare(self, configurations: Sequence[Any], seed: int, *, resume: bool) -> int:
        """Start a run of a new sweep, or of the sweep in the folder. Only rank 0 of the first group may call it.

        Return the number of experiments that have already ended. If the group was started again, join the existing run
        and return 0. Raise ValueError if the folder contains a sweep with different configurations, or other files.
        """
        if self._run.exists():
            self.join()
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep = self.folder / _SWEEP
        if not sweep.exists() and any(not path.name.startswith(f"part-{_SWEEP}") for path in self.folder.iterdir()):
            raise ValueError(f"{self.folder} is neither empty nor the folder of a sweep; pass a different directory=")
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
        """Wait until rank 0 of the first group has started the run, and read the configurations and the seed.

        Raise TorchMPIError if the run has not started after `PREPARED_SECONDS`.
        """
        give_up_at = time.monotonic() + PREPARED_SECONDS
        while not self._run.exists():
            if time.monotonic() > give_up_at:
                raise TorchMPIError(
                    f"no sweep was prepared in {self.folder} within {PREPARED_SECONDS:g} s; pass the same shared "
                    "folder as directory= on all hosts, and call mpi.experiments in every group"
                )
            time.sleep(_LOOK_SECONDS)
        self.configurations, self.seed = _read(self.folder / _SWEEP)

    def _clear(self) -> None:
        """Remove the files of an earlier sweep, and no other files.

        The claims are removed last, because only they identify the folders of experiments, and the process may be
        killed at any time. The file of the sweep, which identifies the folder, stays until another file replaces it.
        """
        claimed = {path.name for path in self.folder.glob("claims-*/*") if _OWN.fullmatch(path.parent.name)}
        paths = [path for path in self.folder.iterdir() if path.name.removesuffix(".log") in claimed]
        paths += [path for path in self.folder.iterdir() if _OWN.fullmatch(path.name)]
        for path in sorted(filter(trusted_files.is_own, paths), key=lambda path: path.name.startswith("claims-")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    # --- experiments

    def claim(self) -> int | None:
        """Claim the first experiment that no group has claimed, and return its number, or None if none is left."""
        for number in range(len(self.configurations)):
            if (self.folder / f"ended-{number:04}").exists():
                continue
            # Each group links its file to the name of the claim, which succeeds for exactly one group.
            part = self._part(f"claim-{number:04}", str(self.group).encode())
            try:
                os.link(part, self._claims / f"{number:04}")
            except FileExistsError:
                # NFS also reports this error after a success, if the reply was lost and the call was repeated.
                if part.stat().st_nlink == 1:
                    continue
            finally:
                part.unlink()
            # Remove the files of an earlier run in which the experiment did not end.
            for former in (self.log(number), self._reports(number)):
                trusted_files.refuse_others(former, _REMEDY)
                former.unlink(missing_ok=True)
            return number
        return None

    def abandoned(self) -> list[tuple[int, float]]:
        """Return (number, time of the claim) of the experiments in which this group died, before it was started again.

        The group has claimed these experiments in this run, but they have no outcome.
        """
        claims = [path for path in self._claims.iterdir() if _read_text(path) == str(self.group)]
        open_claims = [path for path in claims if not (self.folder / f"ended-{path.name}").exists()]
        return sorted((int(path.name), path.stat().st_mtime) for path in open_claims)

    def end(self, row: Experiment) -> None:
        """Record the outcome of an experiment."""
        try:
            packed = pickle.dumps(row)
        except Exception as error:  # The methods of the user's object may raise any exception.
            text = f"the result of train_fn cannot be pickled: {type(error).__name__}: {error}"
            row = dataclasses.replace(row, state=FAILED, value=None, error=text)
            packed = pickle.dumps(row)
        self._write(f"ended-{row.number:04}", packed)

    def num_ended(self) -> int:
        """Return the number of experiments that have ended, in this run or before."""
        return len(list(self.folder.glob("ended-*")))

    def is_over(self) -> bool:
        """Return whether all experiments have ended."""
        return self.num_ended() >= len(self.configurations)

    def results(self, known: Iterable[Experiment] = ()) -> Results:
        """Return the experiments that have ended. Experiments in ``known`` are not read from their files again."""
        rows = {f"ended-{row.number:04}": row for row in known}
        rows |= {path.name: _read(path) for path in self.folder.glob("ended-*") if path.name not in rows}
        return Results(sorted(rows.values(), key=lambda row: row.number))

    def own_folder(self, number: int) -> Path:
        """Return the folder for the files of one experiment, which may not exist yet."""
        return self.folder / f"{number:04}"

    def _part(self, name: str, content: bytes) -> Path:
        """Write a temporary file, which will get its final ``name`` later."""
        descriptor, path = tempfile.mkstemp(prefix=f"part-{name}-", dir=self.folder)
        with open(descriptor, "wb") as file:
            file.write(content)
        return Path(path)

    def _write(self, name: str, content: bytes) -> None:
        self._part(name, content).replace(self.folder / name)

    def log(self, number: int) -> Path:
        """Return the path of the file for the output of an experiment."""
        return self.folder / f"{number:04}.log"

    # --- reports

    def _reports(self, number: int) -> Path:
        return self.folder / f"reports-{number:04}"

    def add_report(self, number: int, step: int, value: float) -> None:
        """Record a value that a running experiment reports."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(trusted_files.open_file(self._reports(number), flags, remedy=_REMEDY), "a") as file:
            file.write(f"{json.dumps([step, value])}\n")

    def reports(self) -> dict[int, dict[int, float]]:
        """Return the reported values by experiment and step, without experiments that have not reported."""
        reports: dict[int, dict[int, float]] = {}
        for path in self.folder.glob("reports-*"):
            with contextlib.suppress(FileNotFoundError):
                lines = _read_text(path).split("\n")[:-1]  # The last line may be incomplete.
                reports[int(path.name.removeprefix("reports-"))] = dict(map(json.loads, lines))
        return reports


def _read(path: Path) -> Any:
    """Return the object that a file contains as a pickle.

    Raise OSError if the file belongs to another user, and ValueError if the file does not contain a pickle.
    """
    content = trusted_files.read(path, _MOST_BYTES, remedy=_REMEDY)
    try:
        return pickle.loads(content)
    except Exception as error:  # A broken pickle, or a module that cannot be imported, may raise any exception.
        raise ValueError(f"cannot unpickle {path} ({error!r}); import the classes in it first, or {_REMEDY}") from error


def _read_text(path: Path) -> str:
    return trusted_files.read(path, _MOST_BYTES, remedy=_REMEDY).decode()


def _check_same(folder: Path, former: tuple[list[Any], int], now: tuple[list[Any], int]) -> None:
    remedy = "pass resume=False to replace that sweep, or another directory= to keep it"
    if len(former[0]) != len(now[0]) or former[1] != now[1]:
        was, is_now = (f"{len(listed)} configurations with seed={seed}" for listed, seed in (former, now))
        raise ValueError(f"{folder} contains a sweep of {was}, but this sweep has {is_now}; {remedy}")
    for number, (one, other) in enumerate(zip(former[0], now[0], strict=True)):
        if not _is_same(one, other):
            what = f"configuration {number} was {one!r}, and is now {other!r}"
            raise ValueError(f"{folder} contains a sweep with different configurations: {what}; {remedy}")


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two configurations are equal, including the arrays and tensors in them."""
    (leaves, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec == other_spec and all(map(_is_same_leaf, leaves, others))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    # Compare pickles too, because a user's class may not define equality.
    return bool(one == other) or pickle.dumps(one) == pickle.dumps(other)
