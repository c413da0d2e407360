"""Griffe's extension: what the reference cannot see in the sources, or would show otherwise than it is meant."""

import griffe


class Names(griffe.Extension):
    """``collectives.verbs`` makes ``allreduce`` and its twin of ``_allreduce``, which returns an Operation."""

    def on_module_members(self, *, mod, **kwargs):
        """Add a function ``allreduce`` for ``_allreduce``, and so on, that returns what the Operation does."""
        if mod.path == "torchmpi_py.collectives.verbs":
            for function in list(mod.functions.values()):
                if str(function.returns).startswith("Operation["):
                    function.name = function.name.removeprefix("_")
                    function.returns = function.returns.slice
                    mod.set_member(function.name, function)

    def on_instance(self, *, obj, **kwargs):
        """Leave out the ``::`` before a code block, which Markdown does not know."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\n::\n", "\n")
