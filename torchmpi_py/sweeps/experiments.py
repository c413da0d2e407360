"""Many trainings at a time: each group of ranks takes a configuration, runs it, and takes the next one.

Within an experiment the group is the world: level 0, ``rank``, ``size`` and every verb are the group's, by a stack of
levels that lives as long as the experiment. So nothing is left of one that has failed, at whichever call.

1. The *chief* (the first group) prepares the folder of the sweep (`ledger`), and the others join.
2. A group claims the first experiment that nobody has, until there is none.
3. The ranks of the group exchange how the experiment ended here, on a communicator of their own. Where it failed on one
   rank alone, others may wait for that rank for ever: then the job ends. ``torchmpirun --groups`` starts the group's
   job again, for what is left, and the other groups notice nothing.
4. A group without work waits until all experiments have ended; every rank returns the whole table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchmpi_py.collectives import verbs
from torchmpi_py.core import agree, backoff, communication_thread, communicators, ulfm
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import TorchMPIError
from torchmpi_py.launch import group_jobs
from torchmpi_py.runtime import chief, process
from torchmpi_py.runtime import session as sessions
from torchmpi_py.sweeps import early_stopping
from torchmpi_py.sweeps.early_stopping import ExperimentStopped, Running, Stop
from torchmpi_py.sweeps.ledger import Ledger
from torchmpi_py.sweeps.outcome import FAILED, FINISHED, STOPPED, Experiment, Results
from torchmpi_py.sweeps.progress import Progress

OTHERS_SECONDS = 10.0  # how long the others may take to end an experiment that has failed on this rank
_MOST_TEXT_BYTES = 1000
_LOOK_SECONDS = 0.1
_OVER = -1


def experiments(
    configurations: Mapping[str, Iterable[Any]] | Iterable[Any],
    train_fn: Callable[[Any], Any],
    *,
    ranks_per_experiment: int | None = None,
    directory: str | os.PathLike[str] = "experiments",
    csv: str | os.PathLike[str] | None = None,
    seed: int = 0,
    stop: Stop | None = None,
    resume: bool = True,
    progress: bool = True,
) -> Results:
    """Run ``train_fn(configuration)`` for every configuration, on groups of ranks. Collective over the current level.

    configurations: an iterable, or a mapping of names to lists of values, for every combination (a dict each). Rank 0's
    count. They must be picklable, and a generator must end.
    train_fn: called on every rank of a group, where ``rank()``, ``size()``, level 0 and all verbs are the group's. What
    it returns on rank 0 of the group, which must be picklable, is the value. What it prints goes to ``NUMBER.log``.
    ranks_per_experiment: the size of a group; default 1, and all ranks of the job under ``torchmpirun --groups``.
    directory: where the sweep is kept, the same folder on all hosts; no other sweep may use it. csv: a further file for
    the table; ``directory`` always has ``results.csv``.
    seed: before experiment ``i`` the generators of torch, numpy and Python are seeded with ``seed + i``.
    stop: ends experiments early, by what they ``report`` (`early_stopping`).
    resume: if the directory has an unfinished sweep of the same configurations, run what is left of it.
    progress: show a bar (with tqdm) and at the end the table, on rank 0.

    Returns all experiments on every rank. One that raises on all ranks of its group is a row with the error, and so is,
    under ``--groups``, one whose group dies or waits for ever. Without ``--groups`` that ends the job; what has ended
    is kept. ValueError on every rank for wrong arguments. Distributed TensorFlow's third mode; see docs/experiments.md.
    """
    place = group_jobs.group_in(os.environ)
    size = _group_size(ranks_per_experiment, place)
    listed = _listed(configurations)
    token = place.token if place else verbs.broadcast_object(uuid.uuid4().hex if process.rank() == 0 else "")
    number = place.index if place else process.rank() // size
    ledger = Ledger(Path(directory).absolute(), token, number)
    num_before = _open(ledger, listed, seed, resume)
    with Progress(ledger, num_before, shown=progress and chief.is_chief()):
        group = communicators.resolve(None).direct.mpi.Split(process.rank() // size)
        _Group(ledger, group, train_fn, stop, place).run_all()
    results: Results = verbs.broadcast_object(ledger.results() if process.rank() == 0 else None)
    if chief.is_chief():
        if csv is not None:
            results.to_csv(csv)
        if progress:
            print(results, flush=True)  # noqa: T201 - what progress=True asks for
    return results


def _group_size(wanted: int | None, place: group_jobs.GroupOfRanks | None) -> int:
    """Ranks of a group. ValueError if they do not divide the ranks that there are."""
    if chief.is_in_experiment():
        raise ValueError("mpi.experiments was called in an experiment; experiments cannot be nested")
    size = process.size() if wanted is None and place else 1 if wanted is None else wanted
    if not isinstance(size, int) or size < 1 or process.size() % size:
        raise ValueError(f"ranks_per_experiment={wanted!r} does not divide the {process.size()} ranks; start with more")
    if place and size != process.size():
        raise ValueError(
            f"ranks_per_experiment={wanted}, but torchmpirun --groups has made groups of {process.size()}; leave it out"
        )
    return size


def _listed(configurations: Any) -> list[Any]:
    """The configurations that rank 0 has, on every rank. Collective; TypeError or ValueError on every rank."""

    def read() -> list[Any]:
        if process.rank() != 0:
            return []
        if not isinstance(configurations, Mapping):
            return list(configurations)
        values = [list(each) for each in configurations.values()]
        return [dict(zip(configurations, each, strict=True)) for each in itertools.product(*values)]

    listed: list[Any] = _on_all_ranks(read, "the configurations cannot be listed")[0]
    if not listed:
        raise ValueError("there are no configurations: give a list that is not empty, or a mapping of names to lists")
    return listed


def _on_all_ranks(step: Callable[[], Any], what: str) -> list[Any]:
    """The results of ``step`` on all ranks; ValueError on every rank if it raises on one. Collective."""

    def failed(failures: Mapping[int, str]) -> Exception:
        return ValueError(f"mpi.experiments: {what}: {agree.first_text(failures)}")

    return agree.gather_results(verbs.allgather_object, step, (Exception,), _described, failed)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _open(ledger: Ledger, listed: list[Any], seed: int, resume: bool) -> int:
    """Prepare the folder, or join those who have; the number of experiments that had ended before. Collective."""

    def prepare() -> int:
        return ledger.prepare(listed, seed, resume=resume) if chief.is_chief() else 0

    num_before = _on_all_ranks(prepare, "the sweep cannot begin")[0]
    _on_all_ranks(ledger.join, "the sweep cannot begin")
    return int(num_before)


class _Group:
    """The ranks that run one experiment at a time."""

    def __init__(
        self,
        ledger: Ledger,
        group: MPI.Comm,
        train_fn: Callable[[Any], Any],
        stop: Stop | None,
        place: group_jobs.GroupOfRanks | None,
    ) -> None:
        self.ledger = ledger
        self.mpi = group
        self.train_fn = train_fn
        self.stop = stop
        self.place = place

    def run_all(self) -> None:
        """Run experiments until all have ended, those of other groups too. Collective over the group."""
        if self.mpi.rank == 0:
            for number, began in self.ledger.abandoned():
                self._record(number, FAILED, None, self.place.last_end if self.place else "its job ended", began)
        while (number := self._next()) != _OVER:
            self._run(number)
        self.mpi.Free()

    def _next(self) -> int:
        """The next experiment of this group, or `_OVER` when all have ended; this may take as long as others do."""
        number = np.array([_OVER])
        if self.mpi.rank == 0:
            found = self.ledger.claim()
            while found is None and not self.ledger.is_over():
                time.sleep(_LOOK_SECONDS)
            number[0] = _OVER if found is None else found
            if found is not None and self.place:
                self.place.record_experiment()
        backoff.complete(self.mpi.Ibcast(number), backoff.Nap(_LOOK_SECONDS))
        return int(number[0])

    def _run(self, number: int) -> None:
        """Run an experiment, and record how it ended. Collective over the group."""
        began, running = time.time(), Running(number, self.ledger, self.stop)
        with _output_to(self.ledger.log(number)), sessions.narrowed(self.mpi) as levels:
            state, value, error = self._outcome(running)
            errors = self._exchanged(error)
            if errors is not None and not any(errors):
                communication_thread.current().drain()
                levels.free()
            else:
                self._leave_failed(running, errors, error, began)
                levels.free(is_lost=True)  # a rank may have left a call out
        assert errors is not None, "_leave_failed has raised"
        if self.mpi.rank == 0:
            failed = [(rank, text) for rank, text in enumerate(errors) if text]
            if failed:
                where = "" if len(failed) == len(errors) else f"rank {failed[0][0]}: "
                state, value, error = FAILED, None, f"{where}{failed[0][1]}"
            self._record(number, state, value, error, began)

    def _leave_failed(self, running: Running, errors: list[str] | None, error: str, began: float) -> None:
        """Return if no rank of the group is in a call of the failed experiment any more; else end the job."""
        if errors is not None:
            left = self._exchanged("" if _is_idle() else "an operation is under way")
            if left is not None and not any(left):
                return
            error = next(filter(None, errors))
        self._record(running.number, FAILED, None, f"rank {self.mpi.rank}: {error}", began)
        raise TorchMPIError(
            f"experiment {running.number} failed on rank {self.mpi.rank} of its group ({error}), and others may wait "
            "there for ever, so the job ends; torchmpirun --groups goes on with the other experiments"
        )

    def _outcome(self, running: Running) -> tuple[Any, Any, str]:
        """State, value and error of the experiment on this rank."""
        _seed(self.ledger.seed + running.number)
        early_stopping.current = running
        try:
            return FINISHED, self.train_fn(self.ledger.configurations[running.number]), ""
        except ExperimentStopped:
            return STOPPED, running.last_value, ""
        except Exception as error:
            if ulfm.is_death(error):
                raise
            traceback.print_exc()
            return FAILED, None, _described(error)
        finally:
            early_stopping.current = None

    def _exchanged(self, error: str) -> list[str] | None:
        """The errors of all ranks; None where this rank has failed, and others have not come for `OTHERS_SECONDS`."""
        mine = np.zeros(_MOST_TEXT_BYTES, np.uint8)
        text = error.encode()[:_MOST_TEXT_BYTES]
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        all_of_them = np.empty((self.mpi.size, _MOST_TEXT_BYTES), np.uint8)
        limit = OTHERS_SECONDS if error else float("inf")
        if not backoff.complete(self.mpi.Iallgather(mine, all_of_them), backoff.Nap(_LOOK_SECONDS), limit):
            return None
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in all_of_them]

    def _record(self, number: int, state: Any, value: Any, error: str, began: float) -> None:
        ledger = self.ledger
        log, seconds = str(ledger.log(number)), time.time() - began
        configuration, seed = ledger.configurations[number], ledger.seed + number
        ledger.end(Experiment(number, configuration, state, value, error, seconds, began, seed, ledger.group, log))


def _is_idle() -> bool:
    """Whether no operation of this process is under way, after `OTHERS_SECONDS` at the latest."""
    waiting = threading.Thread(target=communication_thread.current().drain, daemon=True)
    waiting.start()
    waiting.join(OTHERS_SECONDS)
    return not waiting.is_alive()


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Within the block what this process prints goes to the end of a file, line by line, by whatever code."""
    former = [(stream, os.dup(number)) for number, stream in ((1, sys.stdout), (2, sys.stderr))]
    with open(path, "a", buffering=1) as log:
        for number, (stream, _) in enumerate(former, 1):
            if stream is not None:
                stream.flush()
            os.dup2(log.fileno(), number)
        try:
            # A stream of a notebook, or of a test, is not the descriptor.
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                yield
        finally:
            for number, (_, kept) in enumerate(former, 1):
                os.dup2(kept, number)
                os.close(kept)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
