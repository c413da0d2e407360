"""The modules and parameters of a module without their names, in a fraction of the time that torch takes for both."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def modules_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Like ``module.modules()``, in its order."""
    seen: set[torch.nn.Module] = set()
    left: list[torch.nn.Module | None] = [module]
    while left:
        part = left.pop()
        if part is not None and part not in seen:
            seen.add(part)
            yield part
            left.extend(reversed(part._modules.values()))


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Like ``module.parameters()``, each once and in its order."""
    return list(dict.fromkeys(p for part in modules_of(module) for p in part._parameters.values() if p is not None))
