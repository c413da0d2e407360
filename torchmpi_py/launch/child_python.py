"""Run a module of the package in a child Python, whatever lies in the current folder.

    python .../launch/child_python.py MODULE ARGUMENTS...

``python -m`` and ``python -c`` look for modules in the current folder first. There a user may have a ``zlib.py`` or a
``platform.py``, which would run in place of the standard library's. The child starts in the current folder, because
paths in its arguments are relative to it, but it starts by a file, and without the file's folder on sys.path. It gets
the package that its parent has, also where another one is installed.
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # then the file's folder is not on sys.path
        del sys.path[0]
    sys.path.insert(0, __file__.rpartition("/torchmpi_py/")[0])
    import torchmpi_py  # noqa: F401  # its other modules are found beside it from now on

    del sys.path[0]

import runpy


def command(module: str, *words: str) -> list[str]:
    """The command of a child Python that runs a module of the package as ``python -m`` would."""
    return [sys.executable, __file__, module, *words]


if __name__ == "__main__":
    del sys.argv[0]
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
