"""Keeps the calls that DDP hands over to C++ under ``model.join(divide_by_initial_world_size=False)``.

C++ asks a ``Work`` that is written in Python only as long as its Python object lives; afterwards ``wait()`` is that of
the class in C++, which knows nothing of the call and waits for ever. C++ keeps the objects of the calls that it makes
itself. The one by which a model tells at the start of a forward pass that its rank has inputs left is made in Python
and handed over, so it is kept here until the next one.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

_last: weakref.WeakKeyDictionary[Joinable, Any] = weakref.WeakKeyDictionary()


def register() -> None:
    """Keep what each model has told last."""
    former = Join.notify_join_context

    def notify(joinable: Joinable) -> Any:
        _last[joinable] = work = former(joinable)
        return work

    Join.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]
