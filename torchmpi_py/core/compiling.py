"""Support for torch.compile: the graph of a compiled function breaks at our calls, which run uncompiled."""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import Any


def leave_alone(*owners: Any) -> None:
    """Exclude functions and the plain methods of classes from compilation, together with all functions that they call.

    This was tested with torch 2.13. In versions of torch without the private names below, the compiler still compiles
    the functions that are called inside.
    """
    members = [member for owner in owners for member in (vars(owner).values() if isinstance(owner, type) else [owner])]
    functions = [member for member in members if isinstance(member, FunctionType)]
    for function in functions:
        vars(function)["_torchdynamo_disable"] = True  # The function does not become part of its caller's graph.
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        module: Any = eval_frame
        skip = module._FrameAction.SKIP
        strategy = module._FrameExecStrategy(skip, skip)
        for function in functions:
            module.set_code_exec_strategy(function.__code__, strategy)
