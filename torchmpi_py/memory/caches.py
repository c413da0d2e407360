"""The processor's caches, as Linux shows them."""

from __future__ import annotations

from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def last_level_cache_bytes(caches: Path = _CACHES) -> int | None:
    """The size of the last-level cache, or None where the system does not show it."""
    found = []
    for folder in caches.glob("index*"):
        try:
            size = (folder / "size").read_text().strip()  # "32768K"
            found.append((int((folder / "level").read_text()), int(size.removesuffix("K")) << 10))
        except (OSError, ValueError):
            continue
    return max(found)[1] if found else None
