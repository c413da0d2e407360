"""MPI for today's PyTorch: ``import torchmpi_py as mpi``, ``mpi.start()``, ``torchmpirun -n 4 train.py``.

The public names are listed in ``__init__.pyi``, where editors and type checkers find them. Each name is loaded from its
module on first use, so that the launcher starts without importing torch. In a rank, importing this package sets
torchrun's variables (``launch.variables``).
"""

import functools
import importlib
import os
import re
import sys
from typing import Any

__version__ = "0.2.0.dev0"

_HINTS = {  # hints by pattern of the name, for users of Horovod and torch.distributed
    "init": "call mpi.start(). mpi.allreduce sums in place, but Horovod's allreduce averages into a copy: see "
    "docs/from_horovod.md",
    "shutdown": "call mpi.stop()",
    "is_initialized": "call mpi.is_started()",
    "get_rank": "call mpi.rank()",
    "get_world_size": "call mpi.size()",
    "all_reduce": "call mpi.allreduce(), which sums in place",
    r"(grouped_)?(allreduce|reducescatter)(_async)?_?": 'call mpi.allreduce(x, op="avg"), which works in place, or '
    'mpi.reduce_scatter(x, op="avg"), for each tensor; without op= both sum',
    "Average": 'pass op="avg" to mpi.allreduce, which sums without op=',
    "synchronize": "call handle.wait(), which returns the result",
    "broadcast_parameters": "call mpi.nn.synchronize_parameters()",
    "DistributedOptimizer": "use mpi.optim.DistributedOptimizer",
    "new_group": "call mpi.split()",
}


def _attempt(what: str, module: str, function: str) -> None:
    """Call a function during an import. Log an error as a warning, because an exception would break the import."""
    try:
        getattr(importlib.import_module(f"{__name__}.{module}"), function)()
    except Exception as error:
        import logging

        logging.getLogger(__name__).warning(
            "torchmpi_py: %s: %r; if the error mentions an environment variable, check its value", what, error
        )


def _register_backend() -> None:
    """Register the torch.distributed backend. ``import torch`` calls this entry point (group ``torch.backends``)."""
    _attempt("the backend torchmpi is not registered", "torch_backend.registration", "register")
    if "TORCHMPIRUN_LAYOUT" in os.environ:
        _attempt("optimizer steps are not counted", "runtime.step_count", "StepCount")


_attempt("torchrun's variables are not set", "launch.variables", "set_variables")


@functools.cache
def _homes() -> dict[str, str]:
    """Return the public names, sorted, each with the module from which the stub imports it."""
    import pkgutil  # The import is here because every process that imports torch also imports this module.

    stub = (pkgutil.get_data(__name__, "__init__.pyi") or b"").decode()
    blocks = re.findall(r"^from (\S+) import \(([^)]*)\)", stub, re.MULTILINE)
    return dict(sorted((name, home) for home, names in blocks for name in re.findall(r"(\w+) as", names)))


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return list(_homes())
    home = None if name.startswith("__") else _homes().get(name)
    if home is None:
        hint = next((f"; {text}" for pattern, text in _HINTS.items() if re.fullmatch(pattern, name)), "")
        # With ``name`` and ``obj``, the interpreter adds the most similar name to the message, if there is one.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__]
        )
    if home == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            how = "torch is not installed; run pip install torch (without a GPU, use the CPU build from pytorch.org)"
            raise ModuleNotFoundError(how, name=error.name) from None
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), "__all__", *_homes()])
