"""Hyperparameter sweeps: each group of ranks takes a configuration, runs it, and takes the next one.

Within an experiment the group is the whole world: level 0, ``rank``, ``size`` and every collective refer to the group.
Each experiment has its own stack of levels, which is freed at the end of the experiment. An experiment that fails in
any call therefore leaves nothing behind. The alternative, a communicator as an argument of ``train_fn``, would require
changes in every call of the user's training code.

A call of `experiments` has four steps:

1. Rank 0 of the first group prepares the folder of the sweep (`ledger`), and the other groups join.
2. A group claims the first experiment that no group has claimed, and repeats this until no experiment is left.
3. The ranks of the group exchange the outcome of the experiment on a separate communicator. If only some ranks have
   failed, the other ranks may wait for them forever, so the job ends. ``torchmpirun --groups`` starts the job of the
   group again for the remaining experiments, and the other groups continue.
4. A group without work waits until all experiments have ended. Then every rank returns the whole table.
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

OTHERS_SECONDS = 10.0  # time for the other ranks to end an experiment that has failed on this rank
_MOST_TEXT_BYTES = 1000
_LOOK_SECONDS = 0.1
_OVER = -1
_BUSY = "an operation is under way"

_folders: list[Path] = []  # folders of all calls in this process; every group has the same order of calls


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
    """Run ``train_fn(configuration)`` for every configuration, with one experiment at a time per group of ranks.

    All ranks of the current level must make this call. Within ``train_fn``, ``mpi.rank()``, ``mpi.size()``, level 0 and
    all collectives refer to the ranks of the group. The output of ``train_fn`` goes to the file ``NUMBER.log``.

    If ``train_fn`` raises an error and all ranks of the group leave ``train_fn`` within 10 s, the results contain the
    error, and the sweep continues. If a rank dies, or other ranks wait for the rank that raised, the job ends, and a
    later call resumes the sweep. Under ``torchmpirun --groups`` only the job of that group ends. The results then
    contain the error, and the group starts again.

    Args:
        configurations (iterable or mapping): one configuration per experiment, or a mapping of names to lists of
            values, for a dictionary of each combination. Rank 0's configurations are used, and must be picklable.
        train_fn (callable): function of a configuration, called on every rank of a group. Its result on rank 0 of the
            group, which must be picklable, is the value of the experiment.
        ranks_per_experiment (int): number of ranks per group, which must divide the number of ranks. Default None: 1
            rank, or all ranks of the job under ``torchmpirun --groups``.
        directory (str or path): folder of the sweep, the same on all hosts and not used by another sweep. Default
            "experiments". The file ``results.csv`` in this folder contains the table.
        seed (int): seed of the sweep. In experiment ``i`` the random generators of torch, numpy and Python are seeded
            with ``seed + i``. Default 0.
        stop (callable): function that decides from the reported values whether an experiment ends early, such as
            ``mpi.sweeps.successive_halving()``. Default None, no early stopping.
        resume (bool): run only the remaining experiments of the sweep in ``directory``, which must have the same
            configurations and seed. False removes that sweep and runs all experiments. Default True.
        progress (bool): show a progress bar, if tqdm is installed, and the table at the end, on rank 0. Default True.

    Returns:
        All experiments, on every rank.

    Raises:
        ValueError: an argument is invalid, experiments are nested, ``directory`` contains another sweep or other files,
            or the hosts do not share ``directory``. Raised on every rank.
        TorchMPIError: an experiment failed on some ranks of its group, and other ranks may wait for them.

    Examples:
        >>> import tempfile
        >>> folder = mpi.broadcast_object(tempfile.mkdtemp())
        >>> def train(configuration):
        ...     return configuration["lr"] * configuration["width"]
        >>> results = mpi.experiments({"lr": [0.1, 0.5], "width": [8, 16]}, train, directory=folder, progress=False)
        >>> results.best().configuration
        {'lr': 0.5, 'width': 16}
    """
    place = group_of_ranks.group_in(os.environ)
    folder = Path(directory).absolute()
    size = _on_all_ranks(lambda: _group_size(ranks_per_experiment, place, folder), "the sweep cannot start")[0]
    listed = _listed(configurations)
    token = f"{place.token}-{len(_folders)}" if place else uuid.uuid4().hex
    _folders.append(folder)
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
    """Return the number of ranks of a group. Raise ValueError if this number or the folder is not valid."""
    if place and folder in _folders:
        raise ValueError(f"an earlier call has used {folder}; pass a different directory= to each call")
    if chief.is_in_experiment():
        raise ValueError("experiments cannot be nested; call mpi.experiments only outside of train_fn")
    size = process.size() if wanted is None and place else 1 if wanted is None else wanted
    if not isinstance(size, int) or size < 1 or process.size() % size:
        raise ValueError(f"ranks_per_experiment={wanted!r}: pass a divisor of the number of ranks, {process.size()}")
    if place and size != process.size():
        raise ValueError(
            f"omit ranks_per_experiment={wanted}: torchmpirun --groups makes one group of these {process.size()} ranks"
        )
    return size


def _listed(configurations: Any) -> list[Any]:
    """Return rank 0's configurations on every rank. Every rank must make this call.

    Raise ValueError, on every rank, if there are no configurations.
    """

    def read() -> list[Any]:
        if process.rank() != 0:
            return []
        if isinstance(configurations, Mapping):
            values = [list(each) for each in configurations.values()]
            items = [dict(zip(configurations, each, strict=True)) for each in itertools.product(*values)]
        else:
            items = list(configurations)
        pickle.dumps(items)  # An object that cannot be pickled must raise here, not in the exchange.
        return items

    listed: list[Any] = _on_all_ranks(read, "the configurations cannot be listed")[0]
    if not listed:
        raise ValueError("mpi.experiments: found no configuration; pass a non-empty list, or a dict of non-empty lists")
    return listed


def _on_all_ranks(step: Callable[[], Any], what: str) -> list[Any]:
    """Return the results of ``step`` on all ranks, in rank order. Every rank must make this call.

    Raise ValueError, on every rank, if ``step`` raises an error on any rank.
    """

    def failed(failures: Mapping[int, str]) -> Exception:
        return ValueError(f"mpi.experiments: {what}: {agree.first_text(failures)}")

    return agree.gather_results(verbs.allgather_object, step, (Exception,), _described, failed)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _open(ledger: Ledger, listed: list[Any], seed: int, resume: bool) -> int:
    """Prepare the folder on rank 0 of the first group, and join the run. Every rank must make this call.

    Return the number of experiments that ended in an earlier run. In the jobs of other groups the result is 0.
    """

    def prepare() -> int:
        return ledger.prepare(listed, seed, resume=resume) if chief.is_chief() else 0

    num_before = int(_on_all_ranks(prepare, "the sweep cannot start")[0])
    _on_all_ranks(ledger.join, "the sweep cannot start")
    if num_before and chief.is_chief():
        text = "%d of %d experiments ended in an earlier run; pass resume=False to run all experiments in %s again"
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
        """Run experiments until the experiments of all groups have ended.

        All ranks of the group must make this call.
        """
        if self.mpi.rank == 0:
            for number, began in self.ledger.abandoned():
                self._record(number, FAILED, None, self.place.last_end if self.place else "its job ended", began)
        while (number := self._next()) != _OVER:
            self._run(number)
        self.mpi.Free()

    def _next(self) -> int:
        """Return the number of this group's next experiment, or `_OVER` when all experiments have ended."""
        number = np.array([_OVER])
        if self.mpi.rank == 0:
            claimed = self._claim()
            while claimed is None and not self.ledger.is_over():
                time.sleep(_LOOK_SECONDS)
            number[0] = _OVER if claimed is None else claimed
        backoff.complete(self.mpi.Ibcast(number), backoff.Nap(_LOOK_SECONDS))
        return int(number[0])

    def _claim(self) -> int | None:
        """Claim an experiment, and return its number, or None if none is left.

        Record for torchmpirun whether the group is running an experiment.
        """
        claimed = None
        try:
            if self.place:
                # Record before the claim: if the process dies after the claim, torchmpirun starts the group again only
                # if it finds a record. The group then records that the experiment failed.
                self.place.record_experiment()
            claimed = self.ledger.claim()
        finally:
            if claimed is None and self.place:
                self.place.record_no_experiment()
        return claimed

    def _run(self, number: int) -> None:
        """Run an experiment, and record its outcome. All ranks of the group must make this call."""
        began = time.time()
        with _output_to(self.ledger.log(number)), sessions.narrowed(self.mpi) as levels:
            state, value, error = self._outcome(Running(number, self.ledger, self.stop))
            errors = self._exchanged(error)
            # If all ranks have succeeded, they free the levels together. After a failure, the levels can be freed only
            # when no rank is still in a call.
            if errors is not None and not any(errors):
                communication_thread.current().drain()
                levels.free()
            else:
                is_equal = self._leave_failed(number, levels, errors, error, began)
                levels.free(is_lost=not is_equal)
        assert errors is not None, "_leave_failed raises if the errors are unknown"
        if self.mpi.rank == 0:
            failed = [(rank, text) for rank, text in enumerate(errors) if text]
            if failed:
                where = "" if len(failed) == len(errors) else f"rank {failed[0][0]}: "
                state, value, error = FAILED, None, f"{where}{failed[0][1]}"
            self._record(number, state, value, error, began)
            if self.place:
                self.place.record_no_experiment()

    def _leave_failed(self, number: int, levels: Stack, errors: list[str] | None, error: str, began: float) -> bool:
        """End the job unless all ranks of the group have left all calls of the failed experiment.

        Return whether the ranks can free their communicators together. They can if all ranks created the same
        communicators and no communicator is broken.
        """
        failed_rank = self.mpi.rank
        if errors is not None:
            comms = [*levels.levels, *levels.others]
            mine = f"{len(comms)} {any(each.is_broken for each in comms)}" if _is_idle() else _BUSY
            all_of_them = self._exchanged(mine)
            if all_of_them is not None and _BUSY not in all_of_them:
                return set(all_of_them) == {f"{len(comms)} False"}
            failed_rank, error = next((rank, text) for rank, text in enumerate(errors) if text)
        self._record(number, FAILED, None, f"rank {failed_rank}: {error}", began)
        raise TorchMPIError(
            f"experiment {number} failed on rank {failed_rank} of its group ({error}). Other ranks may wait for that "
            "rank, so the job ends. Start the job again to resume the sweep (torchmpirun --groups does so itself)."
        )

    def _outcome(self, running: Running) -> tuple[Any, Any, str]:
        """Run the experiment on this rank, and return its state, value and error."""
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
        """Return the error texts of all ranks, in rank order. All ranks of the group must make this call.

        Return None if this rank has failed and another rank does not make this call within `OTHERS_SECONDS`.
        """
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
    """Return whether all operations of this process complete within `OTHERS_SECONDS`."""
    waiting = threading.Thread(target=communication_thread.current().drain, daemon=True)
    waiting.start()
    waiting.join(OTHERS_SECONDS)
    return not waiting.is_alive()


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Append all output of this process to a file during a ``with`` block, including the output of C libraries."""
    former_outputs = [os.dup(1), os.dup(2)]
    descriptor = trusted_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(descriptor, "a", buffering=1) as log, contextlib.ExitStack() as redirected:
        for stream, redirect in ((sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)):
            if _is_descriptor(stream):
                stream.flush()
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            else:  # A notebook or a test has replaced the stream.
                redirected.enter_context(redirect(log))
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            yield
        finally:
            for stream in filter(_is_descriptor, (sys.stdout, sys.stderr)):
                stream.flush()
            for number, former in enumerate(former_outputs, 1):
                os.dup2(former, number)
                os.close(former)


def _is_descriptor(stream: Any) -> bool:
    """Return whether a stream writes to the standard output or standard error of the process."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() in (1, 2)
    except (OSError, ValueError):
        return False


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
