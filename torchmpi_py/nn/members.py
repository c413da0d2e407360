"""The modules and parameters of a module without their names, in a fraction of the time that torch takes for both."""

from __future__ import annotations

import torch


def modules_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Like ``module.modules()``, in its order."""
    found: dict[torch.nn.Module, None] = {}
    left: list[torch.nn.Module | None] = [module]
    while left:
        part = left.pop()
        if part is not None and part not in found:
            found[part] = None
            if part._modules:
                left.extend(reversed(part._modules.values()))
    return list(found)


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Like ``module.parameters()``, each once and in its order."""
    kind, plain = type(module), torch.nn.Module
    if kind.parameters is not plain.parameters or kind.named_parameters is not plain.named_parameters:
        return list(module.parameters())  # it shows others than it holds
    found = {id(p): p for part in modules_of(module) for p in part._parameters.values() if p is not None}
    return list(found.values())
