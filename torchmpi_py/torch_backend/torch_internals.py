"""Keeps the calls that DDP hands over to C++ under ``model.join(divide_by_initial_world_size=False)``.

C++ asks a ``Work`` that is written in Python only as long as its Python object lives; afterwards ``wait()`` is that of
the class in C++, which knows nothing of the call and waits for ever. C++ keeps the objects of the calls that it makes
itself. The one by which a model tells at the start of a forward pass that its rank has inputs left is made in Python
and handed over, so it is kept here until the next one.

What torch.compile must not look into.

A compiled function may call collectives from C++, and they come back to Python here. The compiler would follow them,
and give up over what it finds. So it is told to leave these methods alone, with all that they call. That is done where
they are defined, and costs nothing when they run.

What torch.distributed's C++ side finds in a process group that is written in Python.

It wants a backend of its own there, and asks it for devices and names. It gets one that raises whenever a collective
reaches it, instead of doing nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from types import FunctionType
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.join import Join, Joinable

_last: weakref.WeakKeyDictionary[Joinable, Any] = weakref.WeakKeyDictionary()


def register() -> None:
    """Keep what each model has told last."""
    former = Join.notify_join_context

    def notify(joinable: Joinable) -> Any:
        _last[joinable] = work = former(joinable)
        return work

    Join.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]


def leave_alone(*classes: type) -> None:
    """Keep the compiler out of all methods of ``classes``."""
    with contextlib.suppress(ImportError):  # versions of torch that cannot be told so
        from torch._C._dynamo import eval_frame

        module: Any = eval_frame
        with contextlib.suppress(AttributeError):
            skip = module._FrameAction.SKIP
            strategy = module._FrameExecStrategy(skip, skip)
            for method in (each for owner in classes for each in vars(owner).values()):
                if isinstance(method, FunctionType):
                    module.set_code_exec_strategy(method.__code__, strategy)


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
