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
import copy
import dataclasses
import io
import itertools
import logging
import os
import pickle
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

from torchmpi_py import trusted_files
from torchmpi_py.collectives import verbs
from torchmpi_py.core import agree, backoff, communication_thread, communicators, config, ulfm
from torchmpi_py.core.communicators import Stack
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import EndRequested, TorchMPIError
from torchmpi_py.launch import group_of_ranks
from torchmpi_py.runtime import chief, process, session as sessions
from torchmpi_py.sweeps import early_stopping
from torchmpi_py.sweeps.early_stopping import ExperimentStopped, Running, Stop
from torchmpi_py.sweeps.ledger import Ledger
from torchmpi_py.sweeps.outcome import FAILED, FINISHED, STOPPED, Experiment, Results
from torchmpi_py.sweeps.progress import Progress

logger = logging.getLogger("torchmpi_py")

OTHERS_SECONDS = 10.0  # how long the others may take to end an experiment that has failed on this rank
_MOST_TEXT_BYTES = 1000
_LOOK_SECONDS = 0.1
_OVER = -1
_BUSY = "an operation is under way"

_used: list[Path] = []  # folders of the calls in this process, in their order: the same in every group


def experiments(
    configurations: Mapping[str, Iterable[Any]] | Iterable[Any],
    train_fn: Callable[[Any], Any],
    *,
    ranks_per_experiment: int | None = None,
    directory: str | os.PathLike[str] = "experiments",
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
    directory: where the sweep is kept, the same folder on all hosts; no other sweep may use it. Its ``results.csv`` is
    the table.
    seed: before experiment ``i`` the generators of torch, numpy and Python are seeded with ``seed + i``.
    stop: ends experiments early, by what they ``report`` (`early_stopping`).
    resume: run what is left of the sweep in the directory, which has to be one of the same configurations and seed;
    False: begin again there.
    progress: show a bar (with tqdm) and at the end the table, on rank 0.

    Returns all experiments on every rank. One that raises on all ranks of its group is a row with the error, and so is,
    under ``--groups``, one whose group dies or waits for ever. Without ``--groups`` that ends the job; what has ended
    is kept. ValueError on every rank for wrong arguments. Distributed TensorFlow's third mode; see docs/sweeps.md.
    """
    place = group_of_ranks.group_in(os.environ)
    folder = Path(directory).absolute()
    size = _on_all_ranks(lambda: _group_size(ranks_per_experiment, place, folder), "wrong arguments")[0]
    listed = _listed(configurations)
    token = f"{place.token}-{len(_used)}" if place else uuid.uuid4().hex
    _used.append(folder)
    ledger = Ledger(folder, verbs.broadcast_object(token), place.index if place else process.rank() // size)
    num_before = _open(ledger, listed, seed, resume)
    group = communicators.resolve(None).direct.mpi.Split(process.rank() // size)
    with Progress(ledger, num_before, bar=progress) if chief.is_chief() else contextlib.nullcontext():
        _Group(ledger, group, train_fn, stop, place).run_all()
    results: Results = verbs.broadcast_object(ledger.results() if process.rank() == 0 else None)
    if chief.is_chief() and progress:
        print(results, flush=True)  # noqa: T201 - what progress=True asks for
    return results


def _group_size(wanted: int | None, place: group_of_ranks.GroupOfRanks | None, folder: Path) -> int:
    """Ranks of a group. ValueError if they do not divide the ranks that there are, or the folder was used before."""
    if place and folder in _used:
        raise ValueError(f"{folder} was used by an earlier call of mpi.experiments: give each a directory= of its own")
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
        if isinstance(configurations, Mapping):
            values = [list(each) for each in configurations.values()]
            found = [dict(zip(configurations, each, strict=True)) for each in itertools.product(*values)]
        else:
            found = list(configurations)
        pickle.dumps(found)
        return found

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
    """Prepare the folder on the chief, and join; the number of experiments that had ended before. Collective."""

    def prepare() -> int:
        return ledger.prepare(listed, seed, resume=resume) if chief.is_chief() else 0

    num_before = int(_on_all_ranks(prepare, "the sweep cannot begin")[0])
    _on_all_ranks(ledger.join, "the sweep cannot begin")
    if num_before and chief.is_chief():
        text = "%d of %d experiments had ended before, and are not run again (resume=False would) in %s"
        logger.warning(text, num_before, len(listed), ledger.folder)
    return num_before


@dataclasses.dataclass
class _Group:
    """The ranks that run one experiment at a time."""

    ledger: Ledger
    mpi: MPI.Comm
    train_fn: Callable[[Any], Any]
    stop: Stop | None
    place: group_of_ranks.GroupOfRanks | None

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
            found = self._claim()
            while found is None and not self.ledger.is_over():
                time.sleep(_LOOK_SECONDS)
            number[0] = _OVER if found is None else found
        backoff.complete(self.mpi.Ibcast(number), backoff.Nap(_LOOK_SECONDS))
        return int(number[0])

    def _claim(self) -> int | None:
        """Take an experiment; while it is under way the group has a mark, and none where nothing could be taken."""
        found = None
        try:
            if self.place:
                self.place.record_experiment()  # before the claim, which nobody would take over
            found = self.ledger.claim()
        finally:
            if found is None and self.place:
                self.place.record_no_experiment()
        return found

    def _run(self, number: int) -> None:
        """Run an experiment, and record how it ended. Collective over the group."""
        began = time.time()
        with _output_to(self.ledger.log(number)), sessions.narrowed(self.mpi) as levels:
            state, value, error = self._outcome(Running(number, self.ledger, self.stop))
            errors = self._exchanged(error)
            # All have succeeded: their levels are freed together. Else only where no rank is in a call any more.
            if errors is not None and not any(errors):
                communication_thread.current().drain()
                levels.free()
            else:
                is_alike = self._leave_failed(number, levels, errors, error, began)
                levels.free(is_lost=not is_alike)
        assert errors is not None, "_leave_failed has raised"
        if self.mpi.rank == 0:
            failed = [(rank, text) for rank, text in enumerate(errors) if text]
            if failed:
                where = "" if len(failed) == len(errors) else f"rank {failed[0][0]}: "
                state, value, error = FAILED, None, f"{where}{failed[0][1]}"
            self._record(number, state, value, error, began)
            if self.place:
                self.place.record_no_experiment()

    def _leave_failed(self, number: int, levels: Stack, errors: list[str] | None, error: str, began: float) -> bool:
        """Return if no rank of the group is in a call of the failed experiment any more; else end the job.

        Whether the ranks have made the same communicators, and none broke, so that they can be freed together.
        """
        failed = self.mpi.rank
        if errors is not None:
            made = [*levels.levels, *levels.others]
            mine = f"{len(made)} {any(each.is_broken for each in made)}" if _is_idle() else _BUSY
            all_of_them = self._exchanged(mine)
            if all_of_them is not None and _BUSY not in all_of_them:
                return set(all_of_them) == {f"{len(made)} False"}
            failed, error = next((rank, text) for rank, text in enumerate(errors) if text)
        self._record(number, FAILED, None, f"rank {failed}: {error}", began)
        raise TorchMPIError(
            f"experiment {number} failed on rank {failed} of its group ({error}), and others may wait "
            "there for ever, so the job ends; torchmpirun --groups goes on with the other experiments"
        )

    def _outcome(self, running: Running) -> tuple[Any, Any, str]:
        """State, value and error of the experiment on this rank."""
        _seed(self.ledger.seed + running.number)
        early_stopping.current = running
        os.environ[config.EXPERIMENT] = str(self.ledger.own_folder(running.number))
        try:
            configuration = copy.deepcopy(self.ledger.configurations[running.number])
            return FINISHED, self.train_fn(configuration), ""
        except ExperimentStopped:
            return STOPPED, running.last_value, ""
        except EndRequested:
            raise
        except SystemExit as end:
            return FAILED, None, f"SystemExit: {end.code}"
        except Exception as error:
            if ulfm.is_death(error):
                raise
            traceback.print_exc()
            return FAILED, None, _described(error)
        finally:
            early_stopping.current = None
            os.environ.pop(config.EXPERIMENT, None)

    def _exchanged(self, error: str) -> list[str] | None:
        """The errors of all ranks; None where this rank has failed, and others have not come for `OTHERS_SECONDS`."""
        mine = np.zeros(_MOST_TEXT_BYTES, np.uint8)
        text = error.encode()[:_MOST_TEXT_BYTES]
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        all_of_them = np.empty((self.mpi.size, _MOST_TEXT_BYTES), np.uint8)
        limit = OTHERS_SECONDS if text else float("inf")
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
    kept = [os.dup(1), os.dup(2)]
    descriptor = trusted_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(descriptor, "a", buffering=1) as log, contextlib.ExitStack() as redirected:
        for stream, redirect in ((sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)):
            if _is_descriptor(stream):
                stream.flush()
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            else:  # of a notebook, or a test
                redirected.enter_context(redirect(log))
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            yield
        finally:
            for stream in filter(_is_descriptor, (sys.stdout, sys.stderr)):
                stream.flush()
            for number, former in enumerate(kept, 1):
                os.dup2(former, number)
                os.close(former)


def _is_descriptor(stream: Any) -> bool:
    """Whether what is written to the stream goes to standard output or error of the process."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() in (1, 2)
    except (OSError, ValueError):
        return False


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
