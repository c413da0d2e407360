"""MPI for today's PyTorch: ``import torchmpi_py as mpi``, ``mpi.start()``, ``torchmpirun -n 4 train.py``.

Names are loaded when they are first used, so that the launcher starts without importing torch. In a rank the import
sets torchrun's variables (``launch.world``).
"""

import importlib
from typing import Any

from torchmpi_py.launch import world

__version__ = "0.1.0"

_HOMES = {
    "collectives.autotune": ["autotune"],
    "collectives.consistency": ["check_with_allreduce"],
    "collectives.objects": [
        "allgather_object",
        "allgather_object_async",
        "broadcast_object",
        "broadcast_object_async",
    ],
    "collectives.registry": ["availability"],
    "collectives.selector": ["selector"],
    "collectives.verbs": [
        f"{verb}{form}"
        for verb in (
            "allgather",
            "allreduce",
            "alltoall",
            "broadcast",
            "gather",
            "recv",
            "reduce",
            "reduce_scatter",
            "scatter",
            "send",
            "sendreceive",
        )
        for form in ("", "_async")
    ],
    "communicators": [
        "Communicator",
        "at",
        "communicator",
        "communicator_names",
        "push_communicator",
        "set_collective_span",
        "set_communicator",
        "split",
    ],
    "config": ["Tuning"],
    "engine.loaders": ["shard"],
    "errors": [
        "CollectiveTimeout",
        "CommunicatorError",
        "FlavourError",
        "LaunchError",
        "NotStarted",
        "ParameterServerError",
        "RankDied",
        "RanksDisagree",
        "TorchMPIError",
        "Unavailable",
        "Unimplemented",
    ],
    "handles": ["Handle", "wait_all"],
    "runtime": [
        "barrier",
        "device",
        "host_name",
        "is_started",
        "local_rank",
        "local_size",
        "num_nodes",
        "rank",
        "session",
        "size",
        "start",
        "stop",
    ],
    "survivors": ["catch_up", "elastic"],
    "symmetric": ["symmetric_empty"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("engine", "nn", "paramserver")

__all__ = sorted([*_HOME_OF, *_MODULES])

world.set_variables()


def _register_backend() -> None:
    """Register the torch.distributed backend, at the end of ``import torch``: its entry point in ``torch.backends``.

    torch cannot be imported where an entry point fails, so an error is a warning here.
    """
    try:
        importlib.import_module(f"{__name__}.torch_backend.registration").register()
    except Exception as error:
        import logging

        logging.getLogger(__name__).warning("the backend torchmpi is not registered: %r", error)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
