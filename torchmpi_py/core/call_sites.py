"""Calls: what is noted of an operation but for its time, kept by the place in the program that calls it.

Where that is, is found by going up the frames until one is not the package's own. What was found is kept, and looked up
again where the same place calls something else.
"""

from __future__ import annotations

import os
import zlib
from types import CodeType
from typing import Any

from torchmpi_py.core.recorded import Plain, Recorded
from torchmpi_py.core.sequences import CallSequence
from torchmpi_py.core.status_board import CHECKSUM_BITS, STRING_BITS, Board

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BENCH = os.path.join(_PACKAGE, "bench", "")  # which calls as a program does
_MOST_KEPT = 4096
SIZE = 2
"""Where the number of bytes stands among what ranks call alike, if it has to be the same."""

Known = tuple[CodeType, Any, CallSequence, int, int]
"""What is kept of a call: the code it is in, what ranks call alike, and in which sequence; the numbers of its row and
of two strings, what and where; a checksum."""


UNKNOWN = (None, ..., None, 0, 0)
"""In the place of a call that is not known: no call is the same."""


def look_up(used: Board, operation: Recorded, sequence: CallSequence, frame: Any) -> tuple[int, int]:
    """What is noted of a call; kept for the user's own frames."""
    code, fingerprint = frame.f_code, operation.fingerprint
    words, checksum = _in_words(used, _by_itself(operation) if fingerprint is None else fingerprint)
    site = _site(used, frame)
    names = (sequence.index + 1) << 2 * STRING_BITS | words << STRING_BITS | site
    if used.sites.get((id(code), frame.f_lasti), (0,))[0] == site and fingerprint is not None:
        if len(used.calls) > _MOST_KEPT:
            used.calls.clear()
        used.calls[id(code) + frame.f_lasti] = code, fingerprint, sequence, names, checksum
    return names, checksum


def _by_itself(operation: Recorded) -> tuple[Any, ...]:
    """What is said of an operation that has no counterparts to compare with; of a message, from or to whom."""
    if isinstance(operation, Plain):
        return (operation.name,)
    parts = operation.name, operation.flavour.name, 0, getattr(operation.arguments[0], "dtype", "object")
    way = {"send": "to", "recv": "from"}.get(operation.name)
    return parts if way is None else (*parts, way, operation.arguments[-1])


def _in_words(used: Board, fingerprint: tuple[Any, ...]) -> tuple[int, int]:
    """(the string, the checksum) of what ranks call alike; sizes are in the records, and not among the words."""
    if (found := used.texts.get(fingerprint)) is not None:
        return found
    if len(used.texts) > _MOST_KEPT:
        used.texts.clear()
    flat = [part for each in fingerprint for part in (each if isinstance(each, tuple) else (each,))]
    parts = [part for index, part in enumerate(flat) if index != SIZE or not isinstance(part, int)]
    words = used.keep_string(" ".join(str(part) for part in parts))
    checksum = zlib.crc32(repr(fingerprint).encode(errors="backslashreplace")) & (1 << CHECKSUM_BITS) - 1
    used.texts[fingerprint] = made = words, checksum
    return made


def _site(used: Board, frame: Any) -> int:
    """The string with file and line of the nearest caller outside the package."""
    while True:
        site, _ = used.sites.get((id(frame.f_code), frame.f_lasti)) or _name(used, frame)
        if site >= 0:
            return site
        frame = frame.f_back


def _name(used: Board, frame: Any) -> tuple[int, CodeType]:
    """The string of a frame; -1 for the package's own, unless it is the last. The code is kept: its id may return."""
    if len(used.sites) > _MOST_KEPT:
        used.sites.clear()
        used.calls.clear()
    code, site = frame.f_code, -1
    is_own = code.co_filename.startswith(_PACKAGE) and not code.co_filename.startswith(_BENCH)
    if frame.f_back is None or not is_own:
        site = used.keep_string(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
    used.sites[id(code), frame.f_lasti] = made = site, code
    return made
