"""Files with defaults for torchmpirun's options: the site's file, and the user's file, which takes precedence.

The command line takes precedence over both. The site's file is ``/etc/torchmpi.toml``, or the file whose path is in
TORCHMPI_CONFIG. The user's file is ``~/.config/torchmpi.toml``. Each key is the name of an option, with ``_`` instead
of ``-``. Only some options can be set (`_KEYS`)::

    mpi = "openmpi"
    interface = "ib0"
    launch_agent = "/opt/site/bin/remote"
    env = ["NCCL_DEBUG=WARN"]

A false or empty value in the user's file cancels the setting of the site's file.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmpi_py import trusted_files
from torchmpi_py.errors import LaunchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

VARIABLE, SITE, USER = "TORCHMPI_CONFIG", "/etc/torchmpi.toml", "~/.config/torchmpi.toml"
_KEYS = ("mpi", "interface", "srun_mpi", "launch_agent", "mpi_args", "env", "bind", "grace", "timeout")
_LISTS = ("mpi_args", "env")
_REMEDY = f"correct this file (to replace the site's file, set {VARIABLE})"
_MOST_BYTES = 1 << 20


def files(environment: Mapping[str, str]) -> list[Path]:
    """Return the paths of the existing settings files, with the user's file last.

    If TORCHMPI_CONFIG is empty or /dev/null, the site's file is omitted. Raise LaunchError for any other value that is
    not the full path of an existing file.
    """
    named, user = environment.get(VARIABLE, SITE), os.path.expanduser(USER)
    if named not in (SITE, "", os.devnull) and not (os.path.isabs(named) and os.path.exists(named)):
        raise LaunchError(f"{VARIABLE}={named}: expected the full path of a file; correct it, or set {os.devnull}")
    return [Path(path) for path in (named, user) if path != os.devnull and os.path.exists(path)]


def read(path: Path) -> dict[str, list[str]]:
    """Return the settings in a file: for each option, its words on a command line; [] for the option's default.

    Raise LaunchError if the file cannot be read, or for an unknown or invalid setting.
    """
    try:
        table = tomllib.loads(trusted_files.read(path, _MOST_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        why = (getattr(error, "strerror", None) or str(error)).partition(";")[0]
        raise LaunchError(f"{path}: cannot be read as TOML: {why}; {_REMEDY}") from None
    if others := [key for key in table if key not in _KEYS]:
        raise LaunchError(f"{path}: {others[0]} is not a setting ({', '.join(_KEYS)}); {_REMEDY}")
    return {key: _words(path, key, value) for key, value in table.items()}


def _words(path: Path, key: str, value: Any) -> list[str]:
    if value is False or value in ("", []):
        return []
    is_list = isinstance(value, list) and key in _LISTS and all(isinstance(each, str) for each in value)
    if value is True or not (is_list or isinstance(value, (str, int, float))):
        lists = " or a list of strings" * (key in _LISTS)
        raise LaunchError(f"{path}: {key} = {value!r}: expected a string or a number{lists}; {_REMEDY}")
    values = [shlex.join(value)] if is_list and key == "mpi_args" else value if is_list else [value]
    return [f"--{key.replace('_', '-')}={each}" for each in values]
