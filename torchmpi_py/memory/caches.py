"""The size of the processor's last-level cache, as reported by Linux."""

from __future__ import annotations

from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def last_level_cache_bytes(caches: Path = _CACHES) -> int | None:
    """Return the size of the last-level cache in bytes, or None if the system does not report it."""
    sizes = []  # (level, size)
    for folder in caches.glob("index*"):
        try:
            size = (folder / "size").read_text().strip()  # "32768K"
            sizes.append((int((folder / "level").read_text()), int(size.removesuffix("K")) << 10))
        except (OSError, ValueError):
            continue
    return max(sizes)[1] if sizes else None
