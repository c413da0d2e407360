"""``mpi4py.MPI``, whose import initializes MPI, for the rooms above; and the process that MPI belongs to.

``from torchmpi_py.core.mpi_api import MPI`` imports nothing yet: MPI is initialized when the first attribute of ``MPI``
is read, which ``start`` does.

The process that starts the first session is the *owner* of MPI. A forked child (of a data loader, say) inherits the
state of its parent, but neither the rank nor MPI: the child must not call, wait for the parent's operations, or end the
job.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:

    class _LazyModule:
        """Stand-in for ``mpi4py.MPI``; each attribute is looked up there once, and kept."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") and "mpi4py.MPI" not in sys.modules:  # a tool looks at names, and uses no MPI
                raise AttributeError(name)
            from mpi4py import MPI

            value = getattr(MPI, name)
            setattr(self, name, value)
            return value

    MPI = _LazyModule()

_has_owner = False
_is_forked = False


def claim_process() -> bool:
    """Make this process the owner, as it starts its first session; whether there was no owner before."""
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
    """Whether this process is a fork of the owner."""
    return _is_forked
