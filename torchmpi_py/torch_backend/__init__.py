"""Run ``torch.distributed`` over this package: ``dist.init_process_group("torchmpi")``.

``import torch`` registers the backend (``registration.py``). If torch does not load backends automatically, importing
this module registers it. Each process group has a communicator of the package, and calls the package's collectives
(``process_group.py``). The other modules are loaded when one of their names is first used, because every process that
imports torch imports this module.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchmpi_py.torch_backend import registration
from torchmpi_py.torch_backend.backend_name import NAME

if TYPE_CHECKING:
    from torchmpi_py.torch_backend.compression_hook import compressed
    from torchmpi_py.torch_backend.ddp_buckets import average
    from torchmpi_py.torch_backend.process_group import ProcessGroup

__all__ = ["NAME", "ProcessGroup", "average", "compressed"]

_HOMES = {
    "ProcessGroup": "process_group",
    "average": "ddp_buckets",
    "compressed": "compression_hook",
}

registration.register()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
