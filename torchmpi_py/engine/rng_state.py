"""The states of the global random generators of this process (torch's, CUDA's, numpy's, Python's) as plain data.

Plain means tensors, numbers and strings: what ``torch.load(weights_only=True)`` reads, which runs no code.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch


def captured() -> dict[str, Any]:
    """The states now. CUDA's is that of the current device, if CUDA is in use. numpy's only if it is the default kind.

    (Somebody may give numpy's global functions another bit generator, whose state is not saved.)
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    kind, key, *rest = np.random.get_state()
    if kind == "MT19937":
        states["numpy"] = [torch.from_numpy(np.asarray(key).astype(np.int64)), *rest]
    version, words, gauss = random.getstate()
    states["python"] = [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss]
    return states


def restore(states: dict[str, Any]) -> None:
    """Let the generators go on from there. CUDA's is left alone where there is none."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        key, *rest = states["numpy"]
        np.random.set_state(("MT19937", key.numpy().astype(np.uint32), *rest))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


def derive(states: dict[str, Any], rank: int) -> None:
    """Give a rank that has no states of its own some that follow from another rank's, and from its number."""
    drawn = zlib.crc32(states["torch"].numpy().tobytes())
    torch.manual_seed((drawn << 24) + rank)
    np.random.seed([drawn, rank])
    random.seed((drawn << 24) + rank)
