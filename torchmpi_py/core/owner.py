"""The process that the session belongs to.

A forked child (of a data loader, say) inherits the state of its parent, but neither its rank nor its MPI: it must not
call, wait for the parent's operations, or end the job.
"""

import os


class _Owner:
    process = os.getpid()


def claim() -> None:
    """Make this process the owner: it starts a session."""
    _Owner.process = os.getpid()


def is_forked() -> bool:
    """Whether this process is a fork of the owner."""
    return os.getpid() != _Owner.process
