"""Run a module of the package in a child Python, independent of the files in the current folder.

    python .../launch/child_python.py MODULE ARGUMENTS...

``python -m`` and ``python -c`` look for modules in the current folder first. A user's ``zlib.py`` or ``platform.py``
there would replace the standard library's. The child starts in the current folder, because its arguments may be
relative paths. But it runs this file by path, and removes the file's folder from sys.path. It uses its parent's copy of
the package, even if another copy is installed.
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # a safe path leaves out the file's folder
        del sys.path[0]
    sys.path.insert(0, __file__.rpartition("/torchmpi_py/")[0])
    import torchmpi_py  # noqa: F401  # the package's other modules are found through it from now on

    del sys.path[0]

import runpy


def command(module: str, *words: str) -> list[str]:
    """Return the command of a child Python that runs a module of the package as ``python -m`` would."""
    return [sys.executable, __file__, module, *words]


if __name__ == "__main__":
    del sys.argv[0]
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
