"""The exceptions of this package.

```text Exception `-- TorchMPIError              the root: catches all errors below |-- NotStarted
mpi.start() was not called, mpi.stop() was, or this is a child process |-- LaunchError            torchmpirun cannot
start the job |-- CommunicatorError      MPI failed, or a communicator cannot carry out the call |   `-- RankDied
a rank died, and the job continues (an elastic job) |-- CheckpointError        a checkpoint cannot be written or read;
the message names rank, host and path |-- FlavourError |   |-- Unimplemented      the flavour does not implement this
collective |   `-- Unavailable        the flavour cannot run here; the message says why and what would help |--
RanksDisagree          ranks made different calls, or hold different values |-- CollectiveTimeout      an operation was
not complete in time (also a TimeoutError) `-- ParameterServerError   a parameter server refused or lost a request ```

EndRequested is a SystemExit, like the one of ``sys.exit``: ``except Exception`` does not catch it.

A mistake of the caller (wrong type, root out of range, unknown op) is a TypeError or a ValueError that names the value
and the remedy. Every rank raises it before anything is sent.

Every TorchMPIError has the attributes ``verb`` (name of the call), ``comm`` and ``rank`` of the call that raised it. An
attribute is None if it is not known, as in errors of the launcher.
"""

from __future__ import annotations

from typing import Any, TypeVar

_E = TypeVar("_E", bound="TorchMPIError")


class TorchMPIError(Exception):
    """Root of the package's own exceptions.

    The message says which other ranks are concerned.

    Attributes:
        verb (str): name of the call that failed, such as "allreduce"; None if not known.
        comm (Communicator): communicator of the call; None if not known.
        rank (int): rank in ``comm`` of the process that raised the error; None if not known.
    """

    verb: str | None = None
    comm: Any = None
    rank: int | None = None

    def _of_call(self: _E, verb: str | None, comm: Any) -> _E:
        """Set the attributes of the call that raised this error, unless an inner call has; return the error."""
        if self.verb is None and verb is not None:
            self.verb, self.comm = verb, comm
            self.rank = None if comm is None else comm.rank
        return self

    def __reduce__(self) -> Any:
        """Pickle the error without ``comm``, which belongs to this process."""
        return type(self), self.args, {**self.__dict__, "comm": None}


class NotStarted(TorchMPIError):  # noqa: N818 - the name says the state, as in the design
    """A call needs ``mpi.start()``, and this process is not started."""


class LaunchError(TorchMPIError):
    """torchmpirun cannot start the job."""


class CommunicatorError(TorchMPIError):
    """MPI failed, or a communicator cannot carry out the call; an exception of MPI is the cause."""


class RankDied(CommunicatorError):  # noqa: N818
    """A rank died in an elastic job (``torchmpirun --elastic``).

    Inside ``with mpi.elastic():`` the other ranks continue.
    """


class CheckpointError(TorchMPIError):
    """A checkpoint cannot be written or read; every rank raises this, whichever rank failed."""


class FlavourError(TorchMPIError):
    """A flavour cannot carry out the call."""


class Unimplemented(FlavourError):  # noqa: N818
    """The flavour does not implement this collective."""


class Unavailable(FlavourError):  # noqa: N818
    """The flavour cannot run here; the message says why and what would help."""


class RanksDisagree(TorchMPIError):  # noqa: N818
    """Ranks made different calls, or hold different values."""


class CollectiveTimeout(TorchMPIError, TimeoutError):  # noqa: N818
    """An operation was not complete in time. It is still pending.

    Call ``error.handle.wait()`` to wait again, also after a blocking call. Do not repeat the call: a second call would
    match the next call of the late ranks. ``handle`` is None for a barrier and in a future.
    """

    handle: Any = None

    def __reduce__(self) -> Any:
        kind, arguments, state = super().__reduce__()
        return kind, arguments, {**state, "handle": None}


class ParameterServerError(TorchMPIError):
    """A parameter server refused or lost a request."""


class EndRequested(SystemExit):
    """The job was asked to end (SIGTERM), and all ranks agreed to end in the same step.

    The exit code is 143.
    """

    def __init__(self) -> None:
        super().__init__(143)
