"""Run a module of the package in a child Python, independent of the files in the current folder.

    python .../launch/child_python.py MODULE ARGUMENTS...

``python -m`` and ``python -c`` search the current folder for modules first. A user's file ``zlib.py`` or
``platform.py`` in this folder would replace a module of the standard library. The child runs in the current folder,
because its arguments may be relative paths. But the child runs this file by its path, and removes the file's folder
from sys.path. It uses the same copy of the package as its parent, even if another copy is installed.
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # With this flag, sys.path does not begin with the file's folder.
        del sys.path[0]
    sys.path.insert(0, __file__.rpartition("/torchmpi_py/")[0])
    import torchmpi_py  # noqa: F401  # From now on, Python finds the package's modules without the entry in sys.path.

    del sys.path[0]

import runpy


def command(module: str, *words: str) -> list[str]:
    """Return the command of a child Python that runs a module of the package as ``python -m`` would."""
    return [sys.executable, __file__, module, *words]


if __name__ == "__main__":
    del sys.argv[0]
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
