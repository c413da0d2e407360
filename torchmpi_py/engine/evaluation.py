"""Evaluation beside training: one rank has no part in the steps, and evaluates the parameters that the others send.

The last rank of the level is the *evaluator*; the others *train*, in a world that is smaller by one. At the end of an
epoch the first training rank sends its parameters and buffers, if the evaluator waits for some (so the statistics of
BatchNorm are of that rank's batches; those of SyncBatchNorm are of all). If not, the epoch goes unevaluated: training
never waits for an evaluation, except for the last one. The evaluator calls the user's function in a world of one, so
that ``engine.test`` works there.

Messages, on a communicator of their own: READY (the evaluator waits); a header (epochs completed, bytes, exit code) and
then the bytes; a header without bytes at the end, which says how training has ended. Distributed TensorFlow's
evaluator reads checkpoints instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch

from torchmpi_py.core import backoff, communication_thread, communicators, ulfm
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.engine import outcomes, samples
from torchmpi_py.engine.batches import BatchIterator
from torchmpi_py.engine.state import Hooks, State, modes_restored
from torchmpi_py.errors import EndRequested, TorchMPIError
from torchmpi_py.runtime import process, session as sessions

Evaluator = Callable[[torch.nn.Module, int], Any]

_READY, _HEADER, _BYTES = 1, 2, 3  # tags
_PIECE_BYTES = 1 << 30
_LOOK_SECONDS = 0.02
# In place of an epoch: training is over; the other ranks have left it, with this exit code; they were asked to end.
_OVER, _LEFT, _ASKED = -1, -2, -3


def train_and_evaluate(
    train: Callable[..., State], hooks: Hooks, state: State, evaluator: Evaluator, *, beside: bool
) -> State:
    """Train what ``state`` holds by the engine's ``train``, and evaluate; the last state, with ``evaluations``.

    ``beside``: on a rank of its own, if there are several. Collective then.
    """
    if not (beside and process.is_started() and process.size() > 1):
        return _train_alone(train, hooks, state, evaluator)
    _check_iterator(state.iterator)
    comm = communicators.resolve(None).direct.mpi.Dup()
    root, last = 0, comm.size - 1
    is_evaluator = comm.rank == last
    group = comm.Split(is_evaluator)
    evaluations: dict[int, Any] = {}
    with _own_world(group):
        if is_evaluator:
            evaluations = _evaluate_to_the_end(comm, root, state, evaluator)
        else:
            state = _train_for(comm, last, train, hooks, state)
    state.evaluations = outcomes.exchanged(evaluations)[last]
    group.Free()
    comm.Free()
    return state


def _train_alone(train: Callable[..., State], hooks: Hooks, state: State, evaluator: Evaluator) -> State:
    evaluations: dict[int, Any] = {}

    def evaluate(now: State) -> None:
        evaluations[now.epoch] = _evaluated(evaluator, now)

    with _after_each_epoch(hooks, evaluate):
        state = train(network=state.network, criterion=state.criterion, iterator=state.iterator)
    if state.epoch not in evaluations:  # a run that had ended before
        evaluate(state)
    state.evaluations = evaluations
    return state


def _check_iterator(iterator: Any) -> None:
    """ValueError if the iterator is divided by the number of all ranks, of which one does not train."""
    if ulfm.is_elastic():
        raise ValueError("evaluator= has a rank of its own, which torchmpirun --elastic cannot replace: leave out one")
    samplers = samples.samplers_of(iterator).values()
    parts = next(filter(None, (getattr(each, "num_replicas", None) for each in samplers)), None)
    if isinstance(iterator, BatchIterator):
        parts = None if iterator.follows_place else iterator.size
    if parts is not None and parts != process.size() - 1:
        raise ValueError(
            f"the iterator is divided into {parts} parts, and with evaluator= {process.size() - 1} of {process.size()} "
            "ranks train: let the engine divide a DatasetIterator (without rank= and size=), or a DataLoader"
        )


@contextmanager
def _own_world(group: MPI.Comm) -> Iterator[None]:
    """Within the block ``group`` is the world. Collective over ``group``."""
    with sessions.narrowed(group) as levels:
        try:
            yield
        except BaseException:
            levels.free(is_lost=True)  # not all ranks need have come here
            raise
        communication_thread.current().drain()
        levels.free()


@contextmanager
def _after_each_epoch(hooks: Hooks, action: Callable[[State], None]) -> Iterator[None]:
    """Within the block the action follows the user's hook."""
    users = hooks.on_end_epoch

    @functools.wraps(users)  # so that the engine can tell whether there is one of the user's
    def both(state: State) -> None:
        users(state)
        action(state)

    hooks.on_end_epoch = both
    try:
        yield
    finally:
        hooks.on_end_epoch = users


def _evaluated(evaluator: Evaluator, state: State) -> Any:
    with modes_restored(state), torch.no_grad():
        state.network.eval()
        return evaluator(state.network, state.epoch)


# --- the ranks that train


def _train_for(comm: MPI.Comm, evaluator: int, train: Callable[..., State], hooks: Hooks, state: State) -> State:
    """Train, and send the evaluator what it can take; at the end the last parameters."""
    is_sender = comm.rank == 0
    if isinstance(state.iterator, BatchIterator):
        state.iterator.take_place()

    def send_if_ready(now: State) -> None:
        if is_sender and now.epoch < now.maxepoch and comm.Iprobe(evaluator, _READY):
            _send(comm, evaluator, now)

    word, code = _LEFT, 1
    try:
        with _after_each_epoch(hooks, send_if_ready):
            state = train(network=state.network, criterion=state.criterion, iterator=state.iterator)
        if is_sender:
            _send(comm, evaluator, state)
            backoff.complete(comm.Irecv(np.empty(0), evaluator, _READY), backoff.Nap(_LOOK_SECONDS))  # the last one
        word = _OVER
    except EndRequested:
        word = _ASKED
        raise
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        raise
    finally:
        if is_sender:  # also after an error: the evaluator then ends as training has ended
            comm.Isend(np.array([word, 0, code]), evaluator, _HEADER).Wait()
    return state


def _send(comm: MPI.Comm, evaluator: int, state: State) -> None:
    """Send parameters and buffers, when the evaluator is ready for them."""
    backoff.complete(comm.Irecv(np.empty(0), evaluator, _READY), backoff.Nap(_LOOK_SECONDS))
    tensors = [tensor.detach().cpu().contiguous() for tensor in _tensors(state.network)]
    # Flat, for one element may have any stride.
    tensors = [tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in tensors]
    content = torch.cat(tensors).numpy() if tensors else np.empty(0, np.uint8)
    comm.Send(np.array([state.epoch, content.size, 0]), evaluator, _HEADER)
    for begin in range(0, content.size, _PIECE_BYTES):
        comm.Send(content[begin : begin + _PIECE_BYTES], evaluator, _BYTES)


def _tensors(network: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, in the same order on every rank."""
    return [*network.parameters(), *network.buffers()]


# --- the rank that evaluates


def _evaluate_to_the_end(comm: MPI.Comm, source: int, state: State, evaluator: Evaluator) -> dict[int, Any]:
    """Evaluate what comes, until training is over."""
    state.network.to(process.device())
    evaluations: dict[int, Any] = {}
    while True:
        # Ask for parameters. The answer: those after some later epoch, or how training has ended.
        ready = comm.Isend(np.empty(0), source, _READY)
        header = np.empty(3, np.int64)
        backoff.complete(comm.Irecv(header, source, _HEADER), backoff.Nap(_LOOK_SECONDS))
        epoch, num_bytes, code = map(int, header)
        if epoch == _ASKED:
            raise EndRequested  # torchmpirun takes any other SystemExit for a failure
        if epoch == _LEFT:
            _end(code)
        if epoch == _OVER:
            ready.Wait()
            return evaluations
        ready.Wait()
        _receive(comm, source, state.network, num_bytes)
        state.epoch = epoch
        evaluations[epoch] = _evaluated(evaluator, state)


def _receive(comm: MPI.Comm, source: int, network: torch.nn.Module, num_bytes: int) -> None:
    content = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    for begin in range(0, num_bytes, _PIECE_BYTES):
        comm.Recv(content[begin : begin + _PIECE_BYTES].numpy(), source, _BYTES)
    tensors = _tensors(network)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if sum(sizes) != num_bytes:
        raise TorchMPIError(
            f"evaluator=: the network has {sum(sizes)} bytes on the rank that evaluates, and {num_bytes} where it is "
            "trained: build the same network on every rank; one that grows cannot be evaluated on a rank of its own"
        )
    with torch.no_grad():
        for tensor, part in zip(tensors, torch.split(content, sizes), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a clone is aligned


def _end(code: int) -> NoReturn:
    """End this rank as the others have ended."""
    if code == 1:
        raise TorchMPIError("training has ended with an error on the other ranks; see what they say")
    raise SystemExit(code)
