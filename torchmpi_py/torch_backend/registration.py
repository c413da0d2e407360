"""Register the backend with torch.distributed: torch calls `register` at the end of ``import torch``.

Every process that imports torch runs this module, including spawned workers. So this module imports only light modules
of the package, and imports torch only inside `register`. The first process group loads the other modules. This module
uses torch's ``Backend.register_backend`` and ``Backend.backend_list``; ``torch_internals.py`` contains all uses of
private names.

By default, ``init_process_group`` uses ``env://`` and gets rank, size and a store from the handler of this scheme. This
package replaces the handler, and calls the former handler if the ranks do not rendezvous over MPI
(``_meets_over_mpi``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlparse

from torchmpi_py.launch import variables
from torchmpi_py.torch_backend.backend_name import NAME


def register() -> None:
    """Register the backend for CPU and CUDA tensors, and replace the handler of ``env://``.

    Do nothing if the backend is already registered, or if torch was built without torch.distributed.
    """
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    importlib.import_module("torchmpi_py.torch_backend.torch_internals").prepare(_rendezvous)


def _create(options: Any, _: object = None) -> Any:
    return importlib.import_module("torchmpi_py.torch_backend.meeting").create(options)


def _rendezvous(former: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of ``env://`` that replaces ``former``."""

    def meet(url: str, **options: Any) -> Any:
        importlib.import_module("torchmpi_py.launch.exit_marks").record_meeting()
        arguments = {name.upper(): values[0] for name, values in parse_qs(urlparse(url).query).items()}
        for name in ("RANK", "WORLD_SIZE"):
            if name not in arguments and variables.is_own(os.environ, name):
                arguments[name] = os.environ[name]
        if not _meets_over_mpi(arguments):
            return former(url, **options)
        rank = int(arguments["RANK"]) if "RANK" in arguments else None
        over_mpi = importlib.import_module("torchmpi_py.torch_backend.meeting").over_mpi
        return over_mpi(rank, _named_backend() == NAME, **options)  # Groups of this backend do not use the store.

    return meet


def _meets_over_mpi(arguments: Mapping[str, str]) -> bool:
    """Return whether to rendezvous over MPI: MPI has started the ranks, and neither the user nor torchrun overrides it.

    ``arguments`` contains RANK and WORLD_SIZE if the user sets them. A process without a launcher is a world of one
    rank if the program selects this backend or has started the package. The result is the same on all ranks.
    """
    has_place = bool(os.environ.get(variables.ADDRESS)) and ("RANK" in os.environ or "RANK" in arguments)
    if variables.is_under_torchrun(os.environ) or (variables.is_own(os.environ, variables.PORT) and has_place):
        return False
    stack = _stack()
    size = variables.size_in(os.environ) if stack is None else stack.levels[0].size
    if arguments.get("WORLD_SIZE", str(size or 1)) != str(size or 1):
        return False
    return size is not None or NAME in _named_backend()


def _stack() -> Any:
    """Return the stack of the package's communicators if the package is started, else None."""
    communicators: Any = sys.modules.get("torchmpi_py.core.communicators")
    return communicators.stack() if communicators is not None and communicators.is_started() else None


def _named_backend() -> str:
    """Return the backend argument of ``init_process_group`` from its frame, because torch does not pass it on."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_locals.get("backend"))
