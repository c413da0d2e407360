"""Defaults of torchmpirun's options in files: the site's first, then the user's, then the command line.

The site's file is ``/etc/torchmpi.toml``, or the one that TORCHMPI_CONFIG names; the user's is
``~/.config/torchmpi.toml``. A key is the name of an option, with ``_`` for ``-``::

    mpi = "openmpi"
    interface = "ib0"
    launch_agent = "/opt/site/bin/remote"
    env = ["NCCL_DEBUG=WARN"]
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from torchmpi_py import trusted_files
from torchmpi_py.errors import LaunchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

VARIABLE, SITE, USER = "TORCHMPI_CONFIG", "/etc/torchmpi.toml", "~/.config/torchmpi.toml"
_MOST_BYTES = 1 << 20


def files(environment: Mapping[str, str]) -> list[Path]:
    """The files that are there, those that win last. LaunchError if the file that TORCHMPI_CONFIG names is missing."""
    named = environment.get(VARIABLE)
    if named and not os.path.exists(named):
        raise LaunchError(f"{VARIABLE}={named}: there is no such file; unset {VARIABLE}, or name a file")
    return [path for path in (Path(named or SITE), Path(USER).expanduser()) if path.exists()]


def words(path: Path) -> list[str]:
    """The options of a file, as a command line has them. LaunchError if the file is not TOML of such options."""
    try:
        content = trusted_files.read(path, _MOST_BYTES).decode()
        table = tomllib.loads(content)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path}: cannot be read as TOML: {error}; correct it, or remove it") from None
    found = []
    for key, value in table.items():
        option = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            found += [option] * value
        else:
            found += [f"{option}={each}" for each in (value if isinstance(value, list) else [value])]
    return found
