"""What torch.compile must not look into.

A compiled function may call collectives from C++, and they come back to Python here. The compiler would follow them,
and give up over what it finds. So it is told to leave these methods alone, with all that they call. That is done where
they are defined, and costs nothing when they run.
"""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import Any


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
