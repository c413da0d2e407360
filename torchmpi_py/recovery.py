"""Going on without ranks that died, where the MPI can (ULFM, of Open MPI 5: ``torchmpirun --elastic``)."""

from __future__ import annotations

import os
from collections.abc import Mapping


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the MPI of this job tells the survivors that a rank died, instead of ending the job."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled", "t", "y")
