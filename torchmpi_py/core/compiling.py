"""torch.compile and this package: a compiled function breaks its graph at our calls, which run as they are."""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import Any


def leave_alone(*owners: Any) -> None:
    """Keep the compiler out of functions, and of all methods of classes, and of what these call.

    Tried on torch 2.13; some versions lack the names.
    """
    with contextlib.suppress(ImportError):
        from torch._C._dynamo import eval_frame

        module: Any = eval_frame
        with contextlib.suppress(AttributeError):
            skip = module._FrameAction.SKIP
            strategy = module._FrameExecStrategy(skip, skip)
            for owner in owners:
                for function in vars(owner).values() if isinstance(owner, type) else [owner]:
                    if isinstance(function, FunctionType):
                        module.set_code_exec_strategy(function.__code__, strategy)
                        vars(function)["_torchdynamo_disable"] = True  # nor does it become part of a caller's graph
