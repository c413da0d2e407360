"""The extensions of a run: the caller's extensions, the default ones, and the replacements of deprecated keywords."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torchmpi_py.core import ulfm
from torchmpi_py.engine import outcomes
from torchmpi_py.engine.checkpoint import Checkpoint
from torchmpi_py.engine.elastic import Elastic
from torchmpi_py.engine.epoch_lines import EpochLines
from torchmpi_py.engine.evaluate import Evaluate
from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.same_batches import FirstBatches
from torchmpi_py.engine.state import nothing

_INSTEAD = {
    "checkpoint": "Checkpoint(folder)",
    "every": "Checkpoint(folder, every=...)",
    "keep": "Checkpoint(folder, keep=...)",
    "stateful": "Checkpoint(folder, stateful=...)",
    "evaluator": "Evaluate(function)",
    "epoch_lines": "EpochLines(), or extensions=[] for no lines",
}
"""The replacement of each keyword that ``train`` accepted in the previous release."""


def extensions_of_run(engine: Any, chosen: Sequence[Extension] | None, former: dict[str, Any]) -> list[Extension]:
    """Return the extensions of one call of ``engine.train``, in the order of their calls.

    ``chosen`` is the argument ``extensions`` of the call, and ``former`` contains its deprecated keywords.
    """
    extensions = [*(chosen or ()), *_of_former_keywords(former)]
    if former.get("epoch_lines", chosen is None) and engine.hooks.on_end_epoch is nothing:
        extensions.append(EpochLines())
    if engine.steps_together and outcomes.size() > 1:
        extensions.append(FirstBatches())
    if engine.steps_together and ulfm.is_elastic() and not any(isinstance(each, Elastic) for each in extensions):
        extensions.insert(0, Elastic())
    # Checkpoint runs last. So it saves the changes of the other extensions, and no other extension draws a random
    # number after a save.
    return sorted(extensions, key=lambda each: isinstance(each, Checkpoint))


def _of_former_keywords(former: dict[str, Any]) -> list[Extension]:
    for name in former:
        if name not in _INSTEAD:
            raise TypeError(f"train() got an unexpected keyword argument {name!r}")
        text = f"train({name}=...) is deprecated; use extensions=[...] with {_INSTEAD[name]} (torchmpi_py.engine)"
        warnings.warn(text, DeprecationWarning, stacklevel=4)
    extensions: list[Extension] = []
    options = {name: former[name] for name in ("every", "keep", "stateful") if name in former}
    if former.get("checkpoint") is not None:
        extensions.append(Checkpoint(former["checkpoint"], **options))
    elif any(options.values()):
        example = f"extensions=[Checkpoint(folder, {next(iter(options))}=...)]"
        raise ValueError(f"train: {', '.join(options)} without checkpoint= would have no effect; use {example}")
    if former.get("evaluator") is not None:
        extensions.append(Evaluate(former["evaluator"]))
    return extensions
