"""Registration of the backend with torch.distributed: torch calls `register` at the end of ``import torch``.

Every process that imports torch runs this module, spawned workers among them. So no heavier part of the package is
imported here, and torch itself only inside `register`. The first process group loads the rest. Of torch, this module
uses ``Backend.register_backend`` and ``Backend.backend_list``; ``torch_internals.py`` does what needs private names.

``env://``, torch's default way to start, asks a handler for rank, size and a store. This package's handler takes its
place, and calls the former one for programs that do not meet over MPI (``_meets_over_mpi``).
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
    """Register the backend, for tensors on the CPU and on CUDA devices, and take ``env://`` over. Idempotent."""
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    importlib.import_module("torchmpi_py.torch_backend.torch_internals").prepare(_rendezvous)


def _create(options: Any, _: object = None) -> Any:
    return importlib.import_module("torchmpi_py.torch_backend.meeting").create(options)


def _rendezvous(former: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of ``env://``, in place of ``former``."""

    def meet(url: str, **options: Any) -> Any:
        importlib.import_module("torchmpi_py.launch.exit_marks").record_meeting()
        given = {name.upper(): values[0] for name, values in parse_qs(urlparse(url).query).items()}
        for name in ("RANK", "WORLD_SIZE"):
            if name not in given and variables.is_own(os.environ, name):
                given[name] = os.environ[name]
        if not _meets_over_mpi(given):
            return former(url, **options)
        rank = int(given["RANK"]) if "RANK" in given else None
        over_mpi = importlib.import_module("torchmpi_py.torch_backend.meeting").over_mpi
        return over_mpi(rank, _named_backend() == NAME, **options)  # whose groups do not use the store

    return meet


def _meets_over_mpi(given: Mapping[str, str]) -> bool:
    """Whether the ranks meet over MPI: an MPI has started them, and neither the user nor torchrun says otherwise.

    ``given``: RANK and WORLD_SIZE, where the user gives them. A process that no launcher has started is a world of one,
    if the program names this backend or has started the package. The answer is the same on all ranks.
    """
    has_place = bool(os.environ.get(variables.ADDRESS)) and ("RANK" in os.environ or "RANK" in given)
    if variables.is_under_torchrun(os.environ) or (variables.is_own(os.environ, variables.PORT) and has_place):
        return False
    stack = _stack()
    size = variables.size_in(os.environ) if stack is None else stack.levels[0].size
    if given.get("WORLD_SIZE", str(size or 1)) != str(size or 1):
        return False
    return size is not None or NAME in _named_backend()


def _stack() -> Any:
    """The package's communicators, if the package is started."""
    communicators: Any = sys.modules.get("torchmpi_py.core.communicators")
    return communicators.stack() if communicators is not None and communicators.is_started() else None


def _named_backend() -> str:
    """The backend for which init_process_group was called, which does not pass the name on to its handler."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_locals.get("backend"))
