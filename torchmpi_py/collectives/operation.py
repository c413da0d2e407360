"""One call of a verb, checked and ready: the single body behind its blocking and its asynchronous form."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import config, journal, ulfm
from torchmpi_py.core.channels import BACKGROUND, MISUSED, NOBODY, Channel
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle
from torchmpi_py.core.journal import Method
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CommunicatorError, RankDied, RanksDisagree
from torchmpi_py.watch import reports, tracing
from torchmpi_py.watch.tracing import POSTED

R = TypeVar("R")
_DEATH_SECONDS = 0.3
_MESSAGES = frozenset({"send", "recv", "sendreceive"})  # of which several may be under way in a channel


class Label(NamedTuple):
    """What identifies an operation to a reader, without its buffers; put into words only when it is shown."""

    name: str
    flavour: str
    num_bytes: int
    comm: Communicator

    def __str__(self) -> str:
        where = f"on rank {self.comm.rank} of {self.comm.size} of {self.comm.key!r}"
        return f"{self.name} ({self.flavour}, {self.num_bytes} bytes) {where}"


class Launcher(Method, Protocol):
    """What an operation needs of its flavour, beside the method that carries it out."""

    def launch(self, operation: Operation[Any]) -> Handle[Any]: ...


@dataclasses.dataclass(slots=True)
class Operation(Generic[R]):
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
    launched: int = 0  # when, if it was launched and is traced
    device: torch.device | None = None  # of the tensors, where it has streams
    fingerprint: tuple[Any, ...] | None = None  # equal on all ranks, verb first; None where not all need to call it
    entry: journal.Entry | None = None

    def run(self, in_background: bool = False) -> R:  # noqa: C901 - in one piece: every call pays for every function
        """Carry it out now, on the channel for this thread.

        CommunicatorError if a thread is in a collective there: for this call and all that follow on the channel.
        """
        channel = self.comm.background if in_background else self.comm.direct
        entry, trace, begin = self.entry, tracing.current, 0
        was_noted = entry is not None
        is_collective, me = self.name not in _MESSAGES, get_ident()
        if is_collective:
            if channel.user != NOBODY:
                raise self._refused(channel, me)
            channel.user = me  # nothing comes between this and the look: no call, no signal
        try:
            if config.can_raise and not was_noted:
                return self.launch().wait()  # a call that blocks inside MPI could not be given up
            if entry is not None:
                journal.begin(entry)
            else:
                entry = self.entry = journal.record(self, channel.thread_role)
            try:
                if trace is not None:
                    begin = trace.begin(self)
                returned = getattr(self.flavour, self.method)(channel, *self.arguments)
                if was_noted:
                    journal.end_launched(entry)
                else:
                    journal.end(entry)
                return self.target if self.conclude is None else self.conclude(returned)  # type: ignore[return-value]
            except (RuntimeError, CommunicatorError, RanksDisagree) as error:
                raise self.explain(error)  # noqa: B904 - it carries its cause
            except BaseException:
                journal.fail(entry)
                raise
            finally:
                if trace is not None:
                    trace.end(self, channel.thread_role, begin)
        finally:
            if is_collective and channel.user == me:
                channel.user = NOBODY

    def _refused(self, channel: Channel, me: int) -> CommunicatorError:
        """The error where another thread is in a collective of the channel, or a signal handler has called this one."""
        if self.entry is not None:
            journal.fail(self.entry)
        if channel.user == me:
            return CommunicatorError(f"{self}: this thread is in a collective of the same communicator already")
        channel.user = MISUSED
        return CommunicatorError(
            f"{self}: two threads of this rank are, or were, in collectives of the same communicator at the same time; "
            "the other ranks cannot know the order of the two. Give each thread a communicator of its own, from "
            "mpi.split"
        )

    def launch(self) -> Handle[R]:
        """Start it."""
        if tracing.current is not None:
            self.launched = time.time_ns()
        self.entry = journal.record(self, BACKGROUND, True)
        try:
            return self.flavour.launch(self)
        except BaseException:
            journal.fail(self.entry)
            raise

    def run_in_background(self) -> R:
        """Carry it out in the communication thread."""
        return self.run(True)

    def finish(self) -> R:
        """The result, once the transfer is complete."""
        trace = tracing.current
        if trace is not None and self.launched:
            trace.end(self, POSTED, self.launched)
        if self.entry is not None:
            journal.end_launched(self.entry)
        return self.target if self.conclude is None else self.conclude(None)  # type: ignore[return-value]

    def explain(self, error: Exception) -> Exception:
        """It has failed. What is told is what is wrong with other ranks, if that can be seen; else what ``error`` says.

        An error of MPI becomes one of ours, with the operation's name.
        """
        sides, differ = "", False
        if self.entry is not None:
            journal.fail(self.entry)
            sides, differ = reports.sides(self.entry)
        if isinstance(error, RanksDisagree):
            if sides and " at " not in str(error):  # where the calls are is not yet told
                error.args = (f"{error} ({sides})",)
            return error
        if isinstance(error, RankDied):
            return error
        if ulfm.is_death(error):
            return ulfm.died(str(self), self.comm.direct.mpi, error)
        is_mpis = isinstance(error, MPI.Exception)
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
        """All that it reads and writes."""
        return (x for x in (*self.arguments, self.target) if isinstance(x, Tensor))

    @property
    def label(self) -> Label:
        """What to call it."""
        return Label(self.name, self.flavour.name, self.num_bytes, self.comm)

    def who_is_late(self) -> str:
        """Which ranks have not come to it, or do something else, as far as can be seen."""
        if self.entry is None:
            return ""
        if (peers := self._peers()) is None:
            return reports.late(self.entry)
        places, here = self.comm.direct.places, self.comm.direct.places[self.comm.rank].node
        return reports.late(self.entry, tuple(places[peer].local for peer in peers if places[peer].node == here))

    def _peers(self) -> tuple[int, ...] | None:
        """Of a message: which ranks it is from and to."""
        if self.name not in _MESSAGES:
            return None
        return self.arguments[-2:] if self.name == "sendreceive" else self.arguments[-1:]

    def __str__(self) -> str:
        return str(self.label)
