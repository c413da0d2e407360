"""Griffe's extension: the verbs of the reference have signature and docstring of the functions they are made of."""

import griffe


class Verbs(griffe.Extension):
    """``collectives.verbs`` makes ``allreduce`` and its twin of ``_allreduce``, which returns an Operation."""

    def on_module_members(self, *, mod, **kwargs):
        """Add a function ``allreduce`` for ``_allreduce``, and so on, that returns what the Operation does."""
        if mod.path == "torchmpi_py.collectives.verbs":
            for function in list(mod.functions.values()):
                if str(function.returns).startswith("Operation["):
                    function.name = function.name.removeprefix("_")
                    function.returns = function.returns.slice
                    mod.set_member(function.name, function)
