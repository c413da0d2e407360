"""Where the program makes a call: outside of torch, and of this package."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_INSTALLED = ("site-packages", "dist-packages")


def program() -> FrameType:
    """The frame of the program that has led here."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def library(frame: FrameType) -> str:
    """The name of the installed package that a frame belongs to; empty for the user's own program."""
    parts = frame.f_code.co_filename.split(os.sep)
    found = next((place for place, part in enumerate(parts[:-1]) if part in _INSTALLED), None)
    return "" if found is None else parts[found + 1].removesuffix(".py")
