"""Griffe's extension: what the reference would show otherwise than it is meant."""

import griffe


class Names(griffe.Extension):
    """Names as Markdown shows them."""

    def on_instance(self, *, obj, **kwargs):
        """Leave out the ``::`` before a code block, which Markdown does not know."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\n::\n", "\n")
