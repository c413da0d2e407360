"""The public surface of the package as sorted text: names with signatures, and the help of its commands.

Run it once per checkout, and compare:

    PYTHONPATH=OLD python scripts/dev/public_surface.py >old.txt
    PYTHONPATH=NEW python scripts/dev/public_surface.py >new.txt
    diff old.txt new.txt
"""

import importlib
import inspect
import os
import re
import subprocess
import sys

import torchmpi_py

MODULES = ["", ".nn", ".engine", ".paramserver", ".torch_backend", ".errors"]
BENCH = ["run", "compare", "step", "timeline"]


def main():
    """Print one line per name and per line of help."""
    lines = [line for name in MODULES for line in of_module(importlib.import_module(f"torchmpi_py{name}"))]
    lines += of_command("torchmpirun", "-m", "torchmpi_py.launch")
    lines += of_command("bench", "-m", "torchmpi_py.bench")
    for command in BENCH:
        lines += of_command(f"bench {command}", "-m", "torchmpi_py.bench", command)
    print("\n".join(lines))


def of_module(module):
    """The lines of the public names of a module, sorted."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if is_public(module, name)]
    return [line for name in sorted(names) for line in of_value(f"{module.__name__}.{name}", getattr(module, name))]


def is_public(module, name):
    """Whether a name without ``__all__`` is one that the package defines."""
    home = getattr(getattr(module, name), "__module__", "") or ""
    return not name.startswith("_") and not inspect.ismodule(getattr(module, name)) and home.startswith("torchmpi_py")


def of_value(name, value):
    """One line for a function or a constant; for a class, also one for each public member, its own and inherited."""
    if not inspect.isclass(value):
        yield f"{name}{signature(value) if callable(value) else f': {type(value).__name__}'}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__)
    yield f"{name}{signature(value)} <- {bases}"
    fields = getattr(value, "__annotations__", {})
    for member in sorted({*dir(value), *fields}):
        found = inspect.getattr_static(value, member, None)
        is_ours = any(member in vars(c) for c in value.__mro__ if c.__module__.startswith("torchmpi_py"))
        if member.startswith("_") or not (is_ours or member in fields):
            continue
        kind = type(found).__name__ if isinstance(found, (property, staticmethod, classmethod)) else ""
        text = signature(getattr(value, member)) if callable(getattr(value, member, None)) else f": {kind or 'field'}"
        yield f"{name}.{member}{text}"


def signature(value):
    """The signature without addresses of objects, and without the modules of annotated types."""
    try:
        text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
        return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    except (TypeError, ValueError):
        return "(...)"


def of_command(name, *words):
    """The lines of a command's help and its exit code."""
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(torchmpi_py.__file__)))
    environment = os.environ | {"COLUMNS": "120", "PYTHONPATH": checkout}
    command = [sys.executable, *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")  # -m looks there first
    lines = (done.stdout + done.stderr).splitlines()
    return [f"{name} --help: {line.rstrip()}" for line in lines] + [f"{name} --help: exit code {done.returncode}"]


if __name__ == "__main__":
    main()
