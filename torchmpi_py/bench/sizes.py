"""Sizes as people write them: ``4``, ``64K``, ``1M``, and ranges ``4:256M:4x``. K, M and G are powers of 1024."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", re.IGNORECASE)
_HOW = "write bytes as 4, 64K, 1M or 2G"


def parse_size(text: str) -> int:
    """Bytes. ValueError, with what is known, unless ``text`` is a number above 0 with an optional K, M or G."""
    match = _SIZE.fullmatch(text.strip())
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if num_bytes < 1:
        raise ValueError(f"size {text!r}: {_HOW}")
    return num_bytes


def parse_sizes(text: str) -> list[int]:
    """Bytes of a list such as ``4,64K,1M:64M:4x``, in rising order, each once.

    A range goes from its first size by the factor (default 2x) up to its second, both included.
    """
    return sorted({num_bytes for part in text.split(",") for num_bytes in _parse_part(part)})


def _parse_part(text: str) -> list[int]:
    if ":" not in text:
        return [parse_size(text)]
    match = re.fullmatch(r"([^:]+):([^:]+)(?::(\d+)x)?", text.strip())
    if match is None or (factor := int(match[3] or 2)) < 2:
        raise ValueError(f"sizes {text!r}: write a range as 4:256M or 4:256M:4x, with a factor of at least 2")
    first, last = parse_size(match[1]), parse_size(match[2])
    if first > last:
        raise ValueError(f"sizes {text!r}: the range ends before it begins")
    sizes = [first]
    while sizes[-1] * factor < last:
        sizes.append(sizes[-1] * factor)
    return [*sizes, last] if sizes[-1] != last else sizes


def format_size(num_bytes: float) -> str:
    """A short form for people: 4 B, 64 KiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.4g} {unit}"
