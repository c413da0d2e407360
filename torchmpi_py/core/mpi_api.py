"""The one door to ``mpi4py.MPI``, whose import initializes MPI.

``from torchmpi_py.core.mpi_api import MPI`` imports nothing yet: MPI is initialized when the first attribute of ``MPI``
is read, which ``start`` does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:

    class _LazyModule:
        """Stand-in for ``mpi4py.MPI``; each attribute is looked up there once, and kept."""

        def __getattr__(self, name: str) -> Any:
            from mpi4py import MPI

            value = getattr(MPI, name)
            setattr(self, name, value)
            return value

    MPI = _LazyModule()
