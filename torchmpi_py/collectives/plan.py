"""Plans, which describe how calls with the same arguments are carried out, and operations, which are calls of a plan.

A call needs a flavour, the arguments that are equal on all ranks, the fingerprint that the ranks compare, and the
flavour's function for the call. These depend on the collective, the communicator, the selector's table, and the dtype,
size and kind of memory of the tensor. A plan holds the results of these lookups. A communicator keeps the plans of flat
CPU tensors (``kept_plans.py``), so that a training loop makes the lookups once.

The alternative is to make all lookups in each call, with a cache for each. It is not used, because the lookups together
take longer than a small message.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import config, journal, sequences, ulfm
from torchmpi_py.core.channels import BACKGROUND, DIRECT, MISUSED, NOBODY, Channel
from torchmpi_py.core.collective import MESSAGES
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, Work
from torchmpi_py.core.journal import Entry
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.status_board import IS_ASYNCHRONOUS, IS_LAUNCH
from torchmpi_py.errors import CommunicatorError, FlavourError, RankDied, RanksDisagree, TorchMPIError, Unavailable
from torchmpi_py.memory import devices
from torchmpi_py.watch import reports, tracing
from torchmpi_py.watch.tracing import POSTED

P = ParamSpec("P")
R = TypeVar("R")
Post = Callable[["Operation[Any]"], Handle[Any]]
_RAISED_BY_ALL = (RanksDisagree, Unavailable, FlavourError, ValueError, TypeError)  # raised by flavours on all ranks
_DEATH_SECONDS = 0.3
_abandoned: list[object] = []  # failed launches, kept because MPI may still write to their buffers


def of_a_part(method: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls ``method`` and marks its errors as raised on some ranks only.

    Other ranks may then wait for a rank that has raised the error.
    """

    @functools.wraps(method)
    def marked(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except Exception as error:
            error.is_of_a_part = True  # type: ignore[attr-defined]
            raise

    return marked


class Carrier:
    """A flavour or a stand-in for a flavour, with a method for each operation that it carries out."""

    name: str
    exchanges_headers = False
    """Whether the ranks compare headers (name, dtype, sizes) before data moves, and all raise if headers differ."""

    def bind(self, plan: Plan) -> tuple[Callable[..., Any], Post | None]:
        """Return the functions (work, post) of a plan.

        ``work`` carries out a call on the direct channel, and gets the arguments of the call. ``post`` starts an
        operation on the direct channel and returns without waiting. If ``post`` is None, the communication thread
        carries out the operations that are launched.
        """
        method, channel, others = getattr(self, plan.method), plan.comm.direct, plan.others
        return lambda *arguments: method(channel, *arguments, *others), None


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Plan:
    """A plan for calls of ``flavour.<method>(channel, *arguments, *others)``.

    Each call has its own ``arguments``: tensors, or one object.
    """

    name: str
    flavour: Carrier
    comm: Communicator
    others: tuple[Any, ...] = ()  # The remaining arguments, equal on all ranks that make the call.
    num_bytes: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None  # The device of the tensors, if it has streams.
    # Values that must be equal on all ranks, starting with the name; None if only some ranks make the call.
    fingerprint: tuple[Any, ...] | None = None
    method: str = ""  # The method of the flavour; if empty, ``name``.
    # ``bind`` sets ``work`` and ``post`` in the first call, from the flavour's ``Carrier.bind``.
    work: Callable[..., Any] | None = dataclasses.field(default=None, init=False)
    post: Post | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.method = self.method or self.name

    def run(  # noqa: C901
        self,
        arguments: tuple[Any, ...],
        target: Any = None,
        conclude: Callable[[Any], Any] | None = None,
        *,
        operation: Operation[Any] | None = None,
        in_background: bool = False,
        frame: FrameType | None = None,
    ) -> Any:
        """Carry out a call; return ``target``, or ``conclude(result)`` if ``conclude`` is set.

        ``operation`` is the operation of the call if ``launch`` has recorded it. ``in_background`` selects the
        background channel instead of the direct one. ``frame`` is passed to ``journal.record``.

        Raise CommunicatorError, in this and all later calls on the channel, if another thread is in
        a collective on the channel.
        """
        # This is a single function, because each nested function call would add overhead to every collective.
        channel = self.comm.background if in_background else self.comm.direct
        entry = None if operation is None else operation.entry
        trace, begin, is_done = tracing.current, 0, False
        # Only one collective at a time may use a channel, because ranks might carry out two in different orders.
        is_collective, me = self.name not in MESSAGES, get_ident()
        if is_collective:
            if channel.user != NOBODY:
                raise self._refused(channel, me, entry)
            # No other thread or signal handler could have run since the test, because nothing was called in between.
            channel.user = me
        try:
            if operation is None and config.can_raise:  # A call that blocks inside MPI could not time out.
                return Operation(self, arguments, target, conclude).launch(IS_LAUNCH).wait()
            if entry is None:
                entry = journal.record(self, channel.thread_role, 0, frame)
            else:
                self._check_earlier(entry)
                journal.begin(entry)
            try:
                if trace is not None:
                    begin = trace.begin(self)
                if in_background:
                    returned = getattr(self.flavour, self.method)(channel, *arguments, *self.others)
                else:
                    returned = (self.work or self.bind())(*arguments)
                is_done = True
                (journal.end if operation is None else journal.end_launched)(entry)
                return target if conclude is None else conclude(returned)
            except BaseException as error:
                raise self._ended_by(error, entry, is_done)  # noqa: B904 - the returned error has its cause
            finally:
                if trace is not None:
                    trace.end(self, channel.thread_role, begin, 0 if operation is None else operation.launched)
        except TorchMPIError as error:
            error._of_call(self.name, self.comm)
            raise
        finally:
            if is_collective and channel.user == me:
                channel.user = NOBODY

    def bind(self) -> Callable[..., Any]:
        """Set ``work`` and ``post`` from the flavour, and return ``work``."""
        work, self.post = self.flavour.bind(self)
        self.work = work  # Assign ``work`` last, because another thread that finds it set also uses ``post``.
        return work

    def _ended_by(self, error: BaseException, entry: Entry, is_done: bool) -> BaseException:
        """Return the error that ``run`` raises after ``error``.

        If ``is_done``, the flavour had already returned, so this rank's part of the operation is complete.
        """
        if not is_done and not self.is_of_all(error):
            journal.break_off(entry)
        if isinstance(error, (RuntimeError, CommunicatorError, RanksDisagree)):
            return self.explain(error, entry)
        journal.fail(entry)
        return error

    def is_of_all(self, error: BaseException) -> bool:
        """Return whether all ranks raise the error, so that later calls still match."""
        # Pickling errors occur on one rank only, and may have any type.
        is_own = isinstance(error, _RAISED_BY_ALL) and not self.name.endswith("_object")
        return is_own and not getattr(error, "is_of_a_part", False)

    def _check_earlier(self, entry: Entry) -> None:
        """Raise CommunicatorError if an earlier operation failed midway, because later calls would no longer match."""
        # If a rank has died, let MPI raise its more precise error instead.
        if entry[5] is not None and entry[4] > entry[5].broken_from and not ulfm.has_lost_ranks():
            journal.fail(entry)
            raise sequences.refused(self.name, self.comm)

    def _refused(self, channel: Channel, me: int, entry: Entry | None) -> CommunicatorError:
        """Return the error for a channel that is in use.

        Another thread is using the channel, or a signal handler interrupted this thread in a collective on the channel.
        """
        if entry is not None:
            journal.fail(entry)
        if channel.user == me:
            why = "this thread is already in a collective on this communicator; avoid collectives in signal handlers"
        else:
            channel.user = MISUSED
            why = (
                "two threads of this rank called collectives on this communicator at the same time, so ranks cannot "
                "match the calls; use a separate communicator in each thread (mpi.split)"
            )
        return CommunicatorError(f"{self}: {why}")._of_call(self.name, self.comm)

    def explain(self, error: Exception, entry: Entry | None) -> Exception:
        """Return the error to raise after ``error`` has ended a call; mark the journal's entry as failed.

        If this rank can find the cause on other ranks, the message describes the cause; otherwise the message of
        ``error`` is kept. An exception of MPI becomes a CommunicatorError with the operation's name.
        """
        explained = self._explained(error, entry)
        return explained._of_call(self.name, self.comm) if isinstance(explained, TorchMPIError) else explained

    def _explained(self, error: Exception, entry: Entry | None) -> Exception:
        """Return ``error`` itself, or an error that describes the other ranks' operations, caused by ``error``."""
        sides, differ = "", False
        if entry is not None:
            journal.fail(entry)
            sides, differ = reports.sides(entry)
        if isinstance(error, RanksDisagree):
            # Add the positions of the calls in the program, unless the message has them already.
            if sides and " at " not in str(error):
                error.args = (f"{error} ({sides})",)
            return error
        if isinstance(error, RankDied):
            return error
        if ulfm.is_death(error):
            return ulfm.died(str(self), self.comm.direct.mpi, error)
        is_mpis = isinstance(error, MPI.Exception)
        if is_mpis and entry is not None:
            journal.break_off(entry)
        if differ:
            explained: Exception = RanksDisagree(f"{self}: the ranks call different operations: {sides}")
        elif died := reports.deaths(_DEATH_SECONDS):
            explained = CommunicatorError(f"{self}: {died}")
        elif is_mpis:
            question = f"Check that every rank makes this call with the same sizes. {sides}".rstrip()
            explained = CommunicatorError(f"{self}: MPI failed: {error}. {question}")
        else:
            return error
        explained.__cause__ = error
        return explained

    def __str__(self) -> str:
        where = f"on rank {self.comm.rank} of {self.comm.size} of {self.comm.key!r}"
        return f"{self.name} ({self.flavour.name}, {self.num_bytes} bytes) {where}"


@dataclasses.dataclass(slots=True, eq=False)
class Operation(Work[R]):
    """One call of a plan, with its own arguments and result.

    The result is the return value of ``conclude`` if it is set, else ``target``, which the flavour has written.
    """

    plan: Plan
    arguments: tuple[Any, ...]
    target: R | None = None
    conclude: Callable[[Any], R] | None = None
    entry: Entry | None = None
    launched: int = 0  # time of the launch, from ``time.time_ns``; 0 for a blocking call, or without tracing

    def run(self, in_background: bool = False) -> R:
        """Carry out the operation, which ``launch`` has recorded, and return the result."""
        returned: R = self.plan.run(
            self.arguments, self.target, self.conclude, operation=self, in_background=in_background
        )
        return returned

    def launch(self, form: int = IS_LAUNCH | IS_ASYNCHRONOUS) -> Handle[R]:
        """Start the operation, and return a handle to wait for the result. ``form`` is passed to ``journal.record``.

        The operation is recorded in the sequence of the channel that carries it out. Each channel has its own MPI
        communicator, on which the ranks compare the order of the calls.
        """
        if tracing.current is not None:
            self.launched = time.time_ns()
        plan = self.plan
        try:
            if plan.work is None:
                plan.bind()
            self.entry = journal.record(plan, BACKGROUND if plan.post is None else DIRECT, form)
            if plan.post is not None:
                return plan.post(self)
            return devices.submit(self, plan.device, self.tensors)
        except BaseException as error:
            if self.entry is not None:
                # If a signal handler has raised the error, the operation may or may not have been posted.
                if not plan.is_of_all(error):
                    journal.break_off(self.entry)
                    _abandoned.append((self, error.__traceback__))
                journal.fail(self.entry)
            if isinstance(error, TorchMPIError):
                error._of_call(plan.name, plan.comm)
            raise

    def finish(self) -> R:
        """Return the result of an operation that was posted to MPI. The transfer must be complete."""
        trace = tracing.current
        if trace is not None and self.launched:
            trace.end(self.plan, POSTED, self.launched, self.launched)
        if self.entry is not None:
            try:
                journal.end_launched(self.entry)
            except RanksDisagree as error:
                error._of_call(self.plan.name, self.plan.comm)
                raise
        return self.target if self.conclude is None else self.conclude(None)  # type: ignore[return-value]

    def explain(self, error: Exception) -> Exception:
        return self.plan.explain(error, self.entry)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the operation reads and writes."""
        return (x for x in (*self.arguments, self.target) if isinstance(x, Tensor))

    @property
    def label(self) -> Plan:
        return self.plan

    def release(self) -> None:
        self.arguments, self.target, self.conclude = (), None, None

    def late_ranks(self) -> str:
        """Return a sentence that lists the ranks that have not called this operation; "" if they are not known."""
        if self.entry is None:
            return ""
        if self.plan.name not in MESSAGES:
            return reports.late(self.entry)
        channel = self.plan.comm.direct
        here = channel.places[channel.rank].node
        peers = [channel.places[peer] for peer in self.plan.others]
        return reports.late(self.entry, tuple(place.local for place in peers if place.node == here))
