"""The exceptions of this package.

```text
Exception
`-- TorchMPIError              the root: catches all errors below
    |-- NotStarted             called before mpi.start(), after mpi.stop(), or in a child process
    |-- LaunchError            torchmpirun cannot start the job
    |-- CommunicatorError      MPI failed, or a communicator cannot carry out the call
    |   `-- RankDied           a rank died, and the job continues (an elastic job)
    |-- CheckpointError        a checkpoint cannot be written or read: the message names rank, host and path
    |-- FlavourError
    |   |-- Unimplemented      the flavour does not implement this collective
    |   `-- Unavailable        the flavour cannot run here: the message has the reason and a remedy
    |-- RanksDisagree          ranks made different calls, or have different values
    |-- CollectiveTimeout      an operation did not complete in time (also a TimeoutError)
    `-- ParameterServerError   a parameter server refused or lost a request
```

EndRequested derives from SystemExit, the exception of ``sys.exit``, so ``except Exception`` does not catch it.

A wrong argument (wrong type, root out of range, unknown op) raises TypeError or ValueError. The message contains the
value and the remedy. Every rank raises the error before anything is sent.

Every TorchMPIError has the attributes ``verb`` (name of the call), ``comm`` and ``rank`` of the call that raised it. An
attribute is None if its value is not known, for example in errors of the launcher.
"""

from __future__ import annotations

from typing import Any, TypeVar

_E = TypeVar("_E", bound="TorchMPIError")


class TorchMPIError(Exception):
    """Root of the package's own exceptions.

    If other ranks are involved, the message lists them.

    Attributes:
        verb (str): name of the call that failed, such as "allreduce"; None if not known.
        comm (Communicator): communicator of the call; None if not known.
        rank (int): rank in ``comm`` of the process that raised the error; None if not known.
    """

    verb: str | None = None
    comm: Any = None
    rank: int | None = None

    def _of_call(self: _E, verb: str | None, comm: Any) -> _E:
        """Set the attributes of the call that raised this error, unless an inner call has set them. Return self."""
        if self.verb is None and verb is not None:
            self.verb, self.comm = verb, comm
            self.rank = None if comm is None else comm.rank
        return self

    def __reduce__(self) -> Any:
        """Pickle the error without ``comm``, which belongs to this process."""
        return type(self), self.args, {**self.__dict__, "comm": None}


class NotStarted(TorchMPIError):  # noqa: N818 - the name describes a state, as in the design
    """The package is not started in this process; call ``mpi.start()`` first."""


class LaunchError(TorchMPIError):
    """torchmpirun cannot start the job."""


class CommunicatorError(TorchMPIError):
    """MPI failed, or a communicator cannot carry out the call. If MPI failed, its exception is the ``__cause__``."""


class RankDied(CommunicatorError):  # noqa: N818
    """A rank died in an elastic job (``torchmpirun --elastic``).

    Inside ``with mpi.elastic():`` the other ranks continue.
    """


class CheckpointError(TorchMPIError):
    """A checkpoint cannot be written or read; every rank raises this error, even if only one rank failed."""


class FlavourError(TorchMPIError):
    """A flavour cannot carry out the call."""


class Unimplemented(FlavourError):  # noqa: N818
    """The flavour does not implement this collective."""


class Unavailable(FlavourError):  # noqa: N818
    """The flavour cannot run here; the message has the reason and a remedy."""


class RanksDisagree(TorchMPIError):  # noqa: N818
    """Ranks made different calls, or have different values."""


class CollectiveTimeout(TorchMPIError, TimeoutError):  # noqa: N818
    """An operation did not complete in time, and is still pending.

    Call ``error.handle.wait()`` to wait again, even after a blocking call. Do not repeat the call: a second call would
    match the next call of the late ranks. ``handle`` is None for a barrier, and for an error that a future raises.
    """

    handle: Any = None

    def __reduce__(self) -> Any:
        kind, arguments, state = super().__reduce__()
        return kind, arguments, {**state, "handle": None}


class ParameterServerError(TorchMPIError):
    """A parameter server refused or lost a request."""


class EndRequested(SystemExit):
    """The job received SIGTERM, and all ranks agreed to end in the same step.

    The exit code is 143.
    """

    def __init__(self) -> None:
        super().__init__(143)
