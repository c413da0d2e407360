"""The folder of a sweep: which experiments there are, who takes which, and how each ended.

Groups of ranks, of one job or of several, share the experiments by way of files alone, so that a group that dies takes
nothing with it, and a sweep that was killed goes on where it was. Every file appears whole, by renaming, or by being
created where no other process has created it (O_EXCL), which holds on network file systems too::

    sweep               the configurations and the seed
    run-TOKEN           a run of the sweep has begun; TOKEN is the same for all groups of the run
    claims-TOKEN/0007   experiment 7 was taken in this run, and by which group
    ended-0007          how experiment 7 ended (`outcome.Experiment`)
    reports-0007        values that it has reported, a line each: step and value
    0007.log            what it printed
    results.csv         all that have ended

A claim without an end is an experiment under way, or one that was under way when its group died. In a later run, with
another token, nobody has claimed it. The *chief*, the first group of a run, prepares the folder; the others wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchmpi_py.errors import TorchMPIError
from torchmpi_py.sweeps.outcome import FAILED, Experiment, Results

PREPARED_SECONDS = 120.0
_LOOK_SECONDS = 0.1


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
        """Begin a run: of a new sweep, or of one that was not complete; how many experiments have ended already.

        ValueError where an unfinished sweep of other configurations is in the folder. A group that was started again
        joins.
        """
        if self._run.exists():
            self.join()
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        former = self._unfinished() if resume else None
        if former is None:
            self._clear()
            _write(self.folder / "sweep", pickle.dumps((list(configurations), seed)))
        else:
            _check_same(self.folder, former, (list(configurations), seed))
        self._claims.mkdir(exist_ok=True)
        _write(self._run, b"")
        self.configurations, self.seed = configurations, seed
        return 0 if former is None else self.num_ended()

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
        self.configurations, self.seed = _read(self.folder / "sweep")

    def _unfinished(self) -> tuple[list[Any], int] | None:
        """Configurations and seed of the sweep in the folder, if some of its experiments have not ended."""
        if not (self.folder / "sweep").exists():
            return None
        configurations, seed = _read(self.folder / "sweep")
        return (configurations, seed) if self.num_ended() < len(configurations) else None

    def _clear(self) -> None:
        """Remove what is left of a former sweep."""
        for path in self.folder.glob("claims-*/*"):
            path.unlink()
        for pattern in ("sweep", "run-*", "ended-*", "reports-*", "[0-9]*.log", "results.csv"):
            for path in self.folder.glob(pattern):
                path.unlink()
        for path in self.folder.glob("claims-*"):
            path.rmdir()

    # --- experiments

    def claim(self) -> int | None:
        """Take the first experiment that no group has; None if there is none left."""
        for number in range(len(self.configurations)):
            if (self.folder / f"ended-{number:04}").exists():
                continue
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(self._claims / f"{number:04}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
                with open(descriptor, "w") as file:
                    file.write(str(self.group))
                self.log(number).unlink(missing_ok=True)
                self._reports(number).unlink(missing_ok=True)
                return number
        return None

    def abandoned(self) -> list[tuple[int, float]]:
        """The experiments that this group has taken in this run, and not ended; and when each was taken."""
        taken = [path for path in self._claims.iterdir() if path.read_text() == str(self.group)]
        left = [path for path in taken if not (self.folder / f"ended-{path.name}").exists()]
        return sorted((int(path.name), path.stat().st_mtime) for path in left)

    def end(self, row: Experiment) -> None:
        """Record how an experiment ended."""
        try:
            packed = pickle.dumps(row)
        except Exception as error:  # what an object's own methods raise
            row = _failed(row, f"its value cannot be pickled: {type(error).__name__}: {error}")
            packed = pickle.dumps(row)
        _write(self.folder / f"ended-{row.number:04}", packed)
        self.results().to_csv(self.folder / "results.csv")

    def num_ended(self) -> int:
        """How many experiments have ended, in this run or before."""
        return len(list(self.folder.glob("ended-*")))

    def is_over(self) -> bool:
        """Whether all experiments have ended."""
        return self.num_ended() >= len(self.configurations)

    def results(self) -> Results:
        """The experiments that have ended."""
        rows: list[Experiment] = [_read(path) for path in self.folder.glob("ended-*")]
        return Results(sorted(rows, key=lambda row: row.number))

    def log(self, number: int) -> Path:
        """The file for the output of an experiment."""
        return self.folder / f"{number:04}.log"

    # --- reports

    def _reports(self, number: int) -> Path:
        return self.folder / f"reports-{number:04}"

    def add_report(self, number: int, step: int, value: float) -> None:
        """Record a value of an experiment under way."""
        with open(self._reports(number), "a") as file:
            file.write(f"{json.dumps([step, value])}\n")

    def reports(self) -> dict[int, dict[int, float]]:
        """By experiment, the values reported by step; of all that have reported any."""
        found: dict[int, dict[int, float]] = {}
        for path in self.folder.glob("reports-*"):
            with contextlib.suppress(FileNotFoundError):
                lines = path.read_text().split("\n")[:-1]  # the last may be under way
                found[int(path.name.removeprefix("reports-"))] = dict(map(json.loads, lines))
        return found


def _failed(row: Experiment, error: str) -> Experiment:
    return Experiment(**{**row.__dict__, "state": FAILED, "value": None, "error": error})


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"part-{path.name}-{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def _check_same(folder: Path, former: tuple[list[Any], int], now: tuple[list[Any], int]) -> None:
    remedy = "resume=False begins anew, and another directory= leaves that one alone"
    if len(former[0]) != len(now[0]) or former[1] != now[1]:
        was, is_now = (f"{len(listed)} configurations with seed={seed}" for listed, seed in (former, now))
        raise ValueError(f"{folder} holds an unfinished sweep of {was}, and this one has {is_now}; {remedy}")
    for number, (one, other) in enumerate(zip(former[0], now[0], strict=True)):
        if pickle.dumps(one) != pickle.dumps(other) and repr(one) != repr(other):
            what = f"configuration {number} was {one!r}, and is {other!r}"
            raise ValueError(f"{folder} holds an unfinished sweep of other configurations: {what}; {remedy}")
