"""What Linux tells of a process: whether it is there, and whether it runs."""

from __future__ import annotations

import pathlib
from typing import NamedTuple


class Process(NamedTuple):
    """``state`` is the system's letter; ``started`` tells a process from a later one with the same number."""

    state: str
    started: int

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, and only its parent has not taken notice."""
        return self.state in "ZXx"


UNKNOWN = Process("?", 0)


def look(number: int) -> Process | None:
    """The process of this number; None if there is none. UNKNOWN where the system has no /proc."""
    try:
        fields = pathlib.Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return Process(fields[0], int(fields[19]))
    except (FileNotFoundError, ProcessLookupError):
        return None if pathlib.Path("/proc/self/stat").exists() else UNKNOWN
    except (OSError, IndexError, ValueError):
        return UNKNOWN
