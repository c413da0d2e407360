"""The modules and parameters of a module without their names, in a fraction of the time that torch takes for both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import torch

_HELD = attrgetter("_modules", "_parameters")
_TAKES_GRADIENT = attrgetter("requires_grad")


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
    if _shows_others(module):
        return list(module.parameters())
    found = {id(p): p for part in modules_of(module) for p in part._parameters.values() if p is not None}
    return list(found.values())


def _shows_others(module: torch.nn.Module) -> bool:
    """Whether ``parameters()`` may give other parameters than those that the module and its parts hold."""
    kind, plain = type(module), torch.nn.Module
    return kind.parameters is not plain.parameters or kind.named_parameters is not plain.named_parameters


class Members:
    """The parameters that a look at modules and at the groups of an optimizer has found.

    ``are_current`` tells whether another look would find the same. It compares the identity of everything that the
    modules hold, which takes two frames and no names. torch's hooks for registrations would be cheaper, but they miss
    ``del``, ``ModuleList.insert`` and ``requires_grad_``.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self.is_sure = not any(map(_shows_others, modules))
        self.parts = list(chain.from_iterable(map(modules_of, modules)))
        held = chain(chain.from_iterable(map(parameters_of, modules)), *groups)
        self.parameters = list({id(p): p for p in held}.values())
        self.trained = [p for p in self.parameters if p.requires_grad]
        self.with_own_zero_grad = [m for m in modules if type(m).zero_grad is not torch.nn.Module.zero_grad]
        self.found = self._identities(modules, groups)

    def are_current(self, modules: Sequence[torch.nn.Module], groups: Sequence[Sequence[torch.nn.Parameter]]) -> bool:
        """Whether another look at these would find the same; False where that is not certain."""
        return self.is_sure and self._identities(modules, groups) == self.found

    def _identities(self, modules: Iterable[torch.nn.Module], groups: Iterable[Iterable[torch.nn.Parameter]]) -> object:
        contents = map(dict.values, chain.from_iterable(map(_HELD, self.parts)))
        ids = map(id, chain(modules, chain.from_iterable(contents), *groups))
        return [*ids, *map(_TAKES_GRADIENT, self.parameters)]
