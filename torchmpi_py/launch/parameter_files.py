"""Search the parameter files of Open MPI and PRRTE, so that torchmpirun keeps the settings of a site or user."""

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from torchmpi_py import trusted_files

_MOST_BYTES = 1 << 20


def have(name: str, reader: str, environment: Mapping[str, str], installed: tuple[str | None, ...] = ()) -> bool:
    """Return whether a parameter file of ``reader`` ("openmpi" or "prte") sets the parameter ``name``.

    ``name`` is a regular expression. ``installed`` contains paths of this MPI's programs or library, from which its
    prefix is derived. A path may be None.
    """
    paths = list(filter(None, installed))
    paths += [os.path.realpath(path) for path in paths]
    # The prefix is two folders above lib/libmpi.so and bin/mpirun.
    prefixes = [os.path.dirname(os.path.dirname(path)) for path in paths]
    prefixes += filter(None, (sys.prefix, environment.get("OPAL_PREFIX")))
    files = [Path(prefix, "etc", f"{reader}-mca-params.conf") for prefix in dict.fromkeys(prefixes)]
    files += [Path(os.path.expanduser("~"), f".{reader}", "mca-params.conf")]
    files += Path("/etc").glob(f"{reader}*/{reader}-mca-params.conf")
    variable = {"openmpi": "OMPI_MCA", "prte": "PRTE_MCA"}[reader] + "_mca_base_param_files"
    files += map(Path, re.split("[:,]", environment.get(variable, "")))
    for file in files:
        with contextlib.suppress(OSError):
            # Do not check the owner of this file, because the MPI does not check it either.
            content = trusted_files.read(file, _MOST_BYTES, owners=None)
            if re.search(rf"^\s*{name}\s*=", content.decode(errors="replace"), re.MULTILINE):
                return True
    return False
