"""Makes the backend known to torch.distributed: torch calls `register` at the end of ``import torch``.

That happens in every process that imports torch, spawned workers among them, so that nothing else of the package is
imported here, and torch itself not before it is there. The first process group loads the rest.

``env://``, torch's default way to start, asks a handler for rank, size and a store. Ours takes its place, and passes on
to it what is not for us (``_is_ours``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlparse

from torchmpi_py.launch import exit_marks, variables

NAME = "torchmpi"


def register() -> None:
    """Register the backend, for tensors on the CPU and on CUDA devices, and take ``env://`` over. Idempotent."""
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    distributed.Backend._plugins = _Plugins(distributed.Backend._plugins)
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["env"] = _meeting(handlers["env"])
    importlib.import_module("torchmpi_py.torch_backend.overrides").register()


class _Plugins(dict[str, Any]):
    """torch's table of backends, in which ours is found, but not listed.

    Where any is listed, torch gives a group such as "cpu:gloo" no default backend, and warns when it is destroyed.
    """

    def __init__(self, former: dict[str, Any]) -> None:
        super().__init__(former)
        self._ours = self.pop(NAME.upper())

    def __contains__(self, name: object) -> bool:
        return name == NAME.upper() or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name != NAME.upper():
            raise KeyError(name)
        return self._ours


def _create(options: Any, _: object = None) -> Any:
    return importlib.import_module("torchmpi_py.torch_backend.process_group").create(options)


def _meeting(former: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of ``env://``, in place of ``former``."""

    def meet(url: str, **options: Any) -> Any:
        exit_marks.record_meeting()
        given = {name.upper(): values[0] for name, values in parse_qs(urlparse(url).query).items()}
        for name in ("RANK", "WORLD_SIZE"):
            if name not in given and variables.is_own(os.environ, name):
                given[name] = os.environ[name]
        if not _is_ours(given):
            return former(url, **options)
        rank = int(given["RANK"]) if "RANK" in given else None
        return importlib.import_module("torchmpi_py.torch_backend.meeting").over_mpi(rank, **options)

    return meet


def _is_ours(given: Mapping[str, str]) -> bool:
    """Whether the ranks meet over MPI: where an MPI has started them, and neither the user nor torchrun says otherwise.

    ``given``: RANK and WORLD_SIZE, where the user gives them. A process that no launcher has started is a world of one,
    if it asks for this backend or has started the package. The answer has to be the same on all ranks.
    """
    has_place = bool(os.environ.get(variables.ADDRESS)) and ("RANK" in os.environ or "RANK" in given)
    if variables.is_under_torchrun(os.environ) or (variables.is_own(os.environ, variables.PORT) and has_place):
        return False
    stack = _stack()
    size = variables.size_in(os.environ) if stack is None else stack.levels[0].size
    if given.get("WORLD_SIZE", str(size or 1)) != str(size or 1):
        return False
    return size is not None or _asks_for_us()


def _stack() -> Any:
    """The package's communicators, if it is started."""
    communicators: Any = sys.modules.get("torchmpi_py.core.communicators")
    return communicators.stack() if communicators is not None and communicators.is_started() else None


def _asks_for_us() -> bool:
    """Whether init_process_group, which does not tell the handler, was called for this backend."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return frame is not None and NAME in str(frame.f_locals.get("backend"))
