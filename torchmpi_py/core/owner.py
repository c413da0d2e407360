"""The process that the session belongs to.

A forked child (of a data loader, say) inherits the state of its parent, but neither its rank nor its MPI: it must not
call, wait for the parent's operations, or end the job.
"""

import os


class _Owner:
    process: int | None = None


def claim() -> bool:
    """Make this process the owner, as it starts its first session. Whether it was none before."""
    is_first = _Owner.process is None
    _Owner.process = os.getpid()
    return is_first


def is_forked() -> bool:
    """Whether this process is a fork of the owner."""
    return _Owner.process is not None and os.getpid() != _Owner.process
