"""One call of a verb, checked and ready: the single body behind its blocking and its asynchronous form."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import config, journal, sequences, ulfm
from torchmpi_py.core.channels import BACKGROUND, DIRECT, MISUSED, NOBODY, Channel
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, Work
from torchmpi_py.core.journal import Method
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.status_board import IS_ASYNCHRONOUS, IS_LAUNCH
from torchmpi_py.errors import CommunicatorError, FlavourError, RankDied, RanksDisagree, TorchMPIError, Unavailable
from torchmpi_py.watch import reports, tracing
from torchmpi_py.watch.tracing import POSTED

P = ParamSpec("P")
R = TypeVar("R")
_RAISED_BY_ALL = (RanksDisagree, Unavailable, FlavourError, ValueError, TypeError)  # by flavours, on all ranks alike
_DEATH_SECONDS = 0.3
_abandoned: list[object] = []  # launches that broke off: MPI may still write into what they hold
_MESSAGES = frozenset({"send", "recv", "sendreceive"})  # of which several may be under way in a channel


def of_a_part(method: Callable[P, R]) -> Callable[P, R]:
    """Mark what a flavour's method raises as errors of a part of the ranks: the others may wait for these."""

    @functools.wraps(method)
    def marked(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except Exception as error:
            error.is_of_a_part = True  # type: ignore[attr-defined]
            raise

    return marked


class Launcher(Method, Protocol):
    """What an operation needs of its flavour, beside the method that carries it out."""

    def posts(self, operation: Operation[Any]) -> bool: ...

    def launch(self, operation: Operation[Any]) -> Handle[Any]: ...

    def again(self, operation: Operation[Any], num_tensors: int) -> Callable[[Any], object]: ...


@dataclasses.dataclass(slots=True)
class Operation(Work[R]):
    """``flavour.<method>(channel, *arguments)``, whose return value ``conclude`` turns into the caller's result.

    Without ``conclude`` the result is ``target``, as the flavour left it.
    """

    name: str
    method: str
    flavour: Launcher
    comm: Communicator
    arguments: tuple[Any, ...]
    conclude: Callable[[Any], R] | None
    num_bytes: int
    target: R | None = None
    launched: int = 0  # time of the launch, in ns of ``time.time_ns``; 0 if blocking, or not traced
    device: torch.device | None = None  # of the tensors, if the device has streams
    fingerprint: tuple[Any, ...] | None = None  # equal on all ranks, verb first; None where not all need to call it
    entry: journal.Entry | None = None
    again: Callable[[Any], object] | None = None  # what a kept operation does with its target, on the direct channel

    def run(self, in_background: bool = False) -> R:  # noqa: C901 - in one piece: every call pays for every function
        """Carry out the operation on the channel for this thread, and return its result.

        CommunicatorError, in this call and all that follow on the channel, if another thread is in a collective there.
        """
        channel = self.comm.background if in_background else self.comm.direct
        entry, trace, begin, is_done = self.entry, tracing.current, 0, False
        was_recorded = entry is not None
        # One collective at a time on a channel: the ranks could not know the order of two.
        is_collective, me = self.name not in _MESSAGES, get_ident()
        if is_collective:
            if channel.user != NOBODY:
                raise self._refused(channel, me)
            channel.user = me  # nothing comes between this and the look: no call, no signal
        try:
            if config.can_raise and not was_recorded:
                return self.launch(IS_LAUNCH).wait()  # a call that blocks inside MPI could not be given up
            # An operation that was launched has its entry in the journal since then.
            if entry is not None:
                self._check_earlier(entry)
                journal.begin(entry)
            else:
                entry = self.entry = journal.record(self, channel.thread_role)
            try:
                if trace is not None:
                    begin = trace.begin(self)
                if in_background or self.again is None:
                    returned = getattr(self.flavour, self.method)(channel, *self.arguments)
                else:
                    returned = self.again(self.target)
                is_done = True
                (journal.end_launched if was_recorded else journal.end)(entry)
                return self.target if self.conclude is None else self.conclude(returned)  # type: ignore[return-value]
            except BaseException as error:
                raise self._ended_by(error, entry, is_done)  # noqa: B904 - it carries its cause
            finally:
                if trace is not None:
                    trace.end(self, channel.thread_role, begin)
        except TorchMPIError as error:
            error._of_call(self.name, self.comm)
            raise
        finally:
            if is_collective and channel.user == me:
                channel.user = NOBODY

    def _ended_by(self, error: BaseException, entry: journal.Entry, is_done: bool) -> BaseException:
        """The error to raise for one in ``run``; ``is_done``: the flavour had returned, as on the other ranks."""
        if not is_done and not self._is_of_all(error):
            journal.break_off(entry)
        if isinstance(error, (RuntimeError, CommunicatorError, RanksDisagree)):
            return self.explain(error)
        journal.fail(entry)
        return error

    def _is_of_all(self, error: BaseException) -> bool:
        """Whether all ranks raise it, so that later operations still meet each other. Pickle's errors are of one."""
        is_own = isinstance(error, _RAISED_BY_ALL) and not self.name.endswith("_object")
        return is_own and not getattr(error, "is_of_a_part", False)

    def _check_earlier(self, entry: journal.Entry) -> None:
        """CommunicatorError if one that was launched earlier broke off: this one would meet it on other ranks."""
        if entry[5] is not None and entry[4] > entry[5].broken_from and not ulfm.has_lost_ranks():  # MPI says it then
            journal.fail(entry)
            raise sequences.refused(self.name, self.comm)

    def _refused(self, channel: Channel, me: int) -> CommunicatorError:
        """The error where another thread is in a collective of the channel, or a signal's handler calls a verb."""
        if self.entry is not None:
            journal.fail(self.entry)
        if channel.user == me:
            why = "this thread is in a collective of the same communicator already"
        else:
            channel.user = MISUSED
            why = (
                "two threads of this rank are, or were, in collectives of the same communicator at the same time; "
                "the other ranks cannot know the order of the two. Give each thread a communicator of its own, from "
                "mpi.split"
            )
        return CommunicatorError(f"{self}: {why}")._of_call(self.name, self.comm)

    def launch(self, form: int = IS_LAUNCH | IS_ASYNCHRONOUS) -> Handle[R]:
        """Start the operation, and return a handle to wait for the result. ``form``: as for ``journal.record``.

        The sequence in the journal belongs to the channel that carries out the operation: on each communicator of MPI
        the calls have one order, which the ranks compare.
        """
        if tracing.current is not None:
            self.launched = time.time_ns()
        try:
            role = DIRECT if self.flavour.posts(self) else BACKGROUND
            self.entry = journal.record(self, role, form)
            return self.flavour.launch(self)
        except BaseException as error:
            if self.entry is not None:
                if not self._is_of_all(error):  # from a signal's handler, say: is it posted?
                    journal.break_off(self.entry)
                    _abandoned.append((self, error.__traceback__))
                journal.fail(self.entry)
            if isinstance(error, TorchMPIError):
                error._of_call(self.name, self.comm)
            raise

    def finish(self) -> R:
        """The result of an operation that was posted to MPI, once the transfer is complete."""
        trace = tracing.current
        if trace is not None and self.launched:
            trace.end(self, POSTED, self.launched)
        if self.entry is not None:
            try:
                journal.end_launched(self.entry)
            except RanksDisagree as error:
                error._of_call(self.name, self.comm)
                raise
        return self.target if self.conclude is None else self.conclude(None)  # type: ignore[return-value]

    def explain(self, error: Exception) -> Exception:
        """The error to raise where ``error`` has ended the operation; the journal's entry becomes a failed one.

        Its message says what is wrong with other ranks where this rank sees that, else what ``error`` says. An error of
        MPI becomes a CommunicatorError with the operation's name.
        """
        explained = self._explained(error)
        return explained._of_call(self.name, self.comm) if isinstance(explained, TorchMPIError) else explained

    def _explained(self, error: Exception) -> Exception:
        """``error`` itself, or an error with what other ranks do, of which ``error`` is the cause."""
        sides, differ = "", False
        if self.entry is not None:
            journal.fail(self.entry)
            sides, differ = reports.sides(self.entry)
        if isinstance(error, RanksDisagree):
            if sides and " at " not in str(error):  # the message does not have the places of the calls yet
                error.args = (f"{error} ({sides})",)
            return error
        if isinstance(error, RankDied):
            return error
        if ulfm.is_death(error):
            return ulfm.died(str(self), self.comm.direct.mpi, error)
        is_mpis = isinstance(error, MPI.Exception)
        if is_mpis and self.entry is not None:
            journal.break_off(self.entry)
        if differ:
            explained: Exception = RanksDisagree(f"{self}: the ranks call different operations: {sides}")
        elif died := reports.deaths(_DEATH_SECONDS):
            explained = CommunicatorError(f"{self}: {died}")
        elif is_mpis:
            asked = f"Did every rank call it with the same sizes? {sides}".rstrip()
            explained = CommunicatorError(f"{self}: MPI failed: {error}. {asked}")
        else:
            return error
        explained.__cause__ = error
        return explained

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the operation reads and writes."""
        return (x for x in (*self.arguments, self.target) if isinstance(x, Tensor))

    @property
    def label(self) -> Operation[R]:
        return self

    def release(self) -> None:
        self.arguments, self.target, self.conclude = (), None, None

    def late_ranks(self) -> str:
        """A sentence with the ranks of this node that have not come to the operation, or that do something else."""
        if self.entry is None:
            return ""
        if (peers := self._peers()) is None:
            return reports.late(self.entry)
        places, here = self.comm.direct.places, self.comm.direct.places[self.comm.rank].node
        return reports.late(self.entry, tuple(places[peer].local for peer in peers if places[peer].node == here))

    def _peers(self) -> tuple[int, ...] | None:
        """The ranks that a message is from and to; None for a collective."""
        if self.name not in _MESSAGES:
            return None
        return self.arguments[-2:] if self.name == "sendreceive" else self.arguments[-1:]

    def __str__(self) -> str:
        where = f"on rank {self.comm.rank} of {self.comm.size} of {self.comm.key!r}"
        return f"{self.name} ({self.flavour.name}, {self.num_bytes} bytes) {where}"
