"""Parameter files of Open MPI and its launcher PRRTE: torchmpirun keeps what a site or user sets there."""

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from torchmpi_py import trusted_files

_MOST_BYTES = 1 << 20


def have(name: str, reader: str, environment: Mapping[str, str], installed: tuple[str | None, ...] = ()) -> bool:
    """Return whether a file that the ``reader`` ("openmpi", "prte") reads sets the parameter ``name``.

    ``installed`` are paths of a program or the library of this MPI; an unknown path is None.
    """
    paths = list(filter(None, installed))
    paths += [os.path.realpath(path) for path in paths]
    # the prefixes of lib/libmpi.so and bin/mpirun
    prefixes = [os.path.dirname(os.path.dirname(path)) for path in paths]
    prefixes += filter(None, (sys.prefix, environment.get("OPAL_PREFIX")))
    files = [Path(prefix, "etc", f"{reader}-mca-params.conf") for prefix in dict.fromkeys(prefixes)]
    files += [Path(os.path.expanduser("~"), f".{reader}", "mca-params.conf")]
    files += Path("/etc").glob(f"{reader}*/{reader}-mca-params.conf")
    variable = {"openmpi": "OMPI_MCA", "prte": "PRTE_MCA"}[reader] + "_mca_base_param_files"
    files += map(Path, re.split("[:,]", environment.get(variable, "")))
    for file in files:
        with contextlib.suppress(OSError):
            # the MPI reads this file regardless of its owner
            content = trusted_files.read(file, _MOST_BYTES, owners=None)
            if re.search(rf"^\s*{name}\s*=", content.decode(errors="replace"), re.MULTILINE):
                return True
    return False
