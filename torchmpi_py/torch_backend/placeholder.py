"""What torch.distributed's C++ side finds in a process group that is written in Python.

It wants a backend of its own there, and asks it for devices and names. It gets one that raises whenever a collective
reaches it, instead of doing nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


def add(group: Any, rank: int, size: int) -> None:
    """Give ``group`` the placeholder, for all devices."""
    from torch._C._distributed_c10d import FakeProcessGroup

    factory: Any = FakeProcessGroup
    options = factory.Options()
    options.error_on_collective = True
    kind = distributed.ProcessGroup.BackendType.CUSTOM
    backend = factory._create_internal(rank, size, options)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
