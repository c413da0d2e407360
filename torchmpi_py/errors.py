"""The exceptions of this package.

::

    Exception
    `-- TorchMPIError              the root: catches everything below
        |-- NotStarted             a call that needs mpi.start() came before it, after mpi.stop(), or in a child process
        |-- LaunchError            torchmpirun cannot start the job as asked
        |-- CommunicatorError      MPI itself failed, or a communicator cannot do what was asked
        |   `-- RankDied           a rank died, and the job goes on (an elastic job)
        |-- CheckpointError        a checkpoint cannot be written or read; the message names rank, host and path
        |-- FlavourError
        |   |-- Unimplemented      the flavour does not carry out this verb
        |   `-- Unavailable        the flavour cannot run here; the message says why and what would help
        |-- RanksDisagree          ranks hold, or asked for, different things
        |-- CollectiveTimeout      an operation was not complete in time (also a TimeoutError)
        `-- ParameterServerError   a parameter server refused or lost a request

EndRequested is a SystemExit, as sys.exit raises, and no error: ``except Exception`` does not catch it.

A mistake of the caller (wrong type, root out of range, unknown op) is a TypeError or a ValueError that names the
value and the remedy; it is raised on every rank alike, before a byte moves.

Every TorchMPIError has the attributes ``verb``, ``comm`` and ``rank``: the call that raised the error. Each is None
where it is not known, as for errors of the launcher.
"""

from __future__ import annotations

from typing import Any, TypeVar

_E = TypeVar("_E", bound="TorchMPIError")


class TorchMPIError(Exception):
    """Root of the package's own exceptions.

    ``verb``: the name of the call that failed, as "allreduce". ``comm``: the Communicator of the call. ``rank``: the
    rank in ``comm`` of the process that raised the error. The message says which other ranks are concerned.
    """

    verb: str | None = None
    comm: Any = None
    rank: int | None = None

    def _of_call(self: _E, verb: str | None, comm: Any) -> _E:
        """This error, with the attributes of the call that raised it, unless an inner call has set them."""
        if self.verb is None and verb is not None:
            self.verb, self.comm = verb, comm
            self.rank = None if comm is None else comm.rank
        return self

    def __reduce__(self) -> Any:
        """The error without ``comm``, which belongs to this process, so that errors can be pickled."""
        return type(self), self.args, {**self.__dict__, "comm": None}


class NotStarted(TorchMPIError):  # noqa: N818 - the name says the state, as in the design
    """A call needs a running session and there is none in this process."""


class LaunchError(TorchMPIError):
    """torchmpirun cannot start the job as asked."""


class CommunicatorError(TorchMPIError):
    """MPI failed, or a communicator cannot do what was asked; the MPI exception is the cause."""


class RankDied(CommunicatorError):  # noqa: N818
    """A rank died; ``with mpi.elastic():`` lets the others go on. Only in elastic jobs (``torchmpirun --elastic``)."""


class CheckpointError(TorchMPIError):
    """A checkpoint cannot be written or read; raised on every rank, whichever failed."""


class FlavourError(TorchMPIError):
    """A flavour cannot serve the call."""


class Unimplemented(FlavourError):  # noqa: N818
    """The flavour does not carry out this verb."""


class Unavailable(FlavourError):  # noqa: N818
    """The flavour cannot run here; the message says why and what would help."""


class RanksDisagree(TorchMPIError):  # noqa: N818
    """Ranks hold, or asked for, different things."""


class CollectiveTimeout(TorchMPIError, TimeoutError):  # noqa: N818
    """An operation was not complete in time. It goes on: ``handle.wait()`` waits again, for a blocking call too.

    The same call again would be another one, and meet the late ranks' next one. ``handle`` is None for a barrier and in
    a future.
    """

    handle: Any = None

    def __reduce__(self) -> Any:
        kind, arguments, state = super().__reduce__()
        return kind, arguments, {**state, "handle": None}


class ParameterServerError(TorchMPIError):
    """A parameter server refused or lost a request."""


class EndRequested(SystemExit):
    """The job was asked to end (SIGTERM), and all ranks have agreed to end in the same step; the exit code is 143."""

    def __init__(self) -> None:
        super().__init__(143)
