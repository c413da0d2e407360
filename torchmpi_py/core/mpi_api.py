"""A lazy ``mpi4py.MPI``, and the process that owns MPI.

The import of ``mpi4py.MPI`` loads the MPI library, and initializes MPI by default. So ``from torchmpi_py.core.mpi_api
import MPI`` does not import mpi4py yet. The import happens when the first attribute of ``MPI`` is read, in ``start``.

The process that starts the first session is the *owner* of MPI. A forked child (of a data loader, for example) inherits
its parent's state, but neither the rank nor MPI. So the child must not call MPI, wait for the parent's operations, or
end the job.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:

    class _LazyModule:
        """A substitute for ``mpi4py.MPI`` that looks up each attribute once and keeps it."""

        def __getattr__(self, name: str) -> Any:
            # A tool that inspects modules reads such names, but must not initialize MPI.
            if name.startswith("__") and "mpi4py.MPI" not in sys.modules:
                raise AttributeError(name)
            from mpi4py import MPI

            value = getattr(MPI, name)
            setattr(self, name, value)
            return value

    MPI = _LazyModule()

_has_owner = False
_is_forked = False


def claim_process() -> bool:
    """Make this process the owner at its first session; return whether MPI had no owner before."""
    global _has_owner
    if _has_owner:
        return False
    _has_owner = True
    os.register_at_fork(after_in_child=_disown)
    return True


def _disown() -> None:
    global _is_forked
    _is_forked = True


def is_forked() -> bool:
    """Return whether this process was forked from the owner."""
    return _is_forked
