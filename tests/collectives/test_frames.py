"""The way of one small blocking call through the package is short: ``scripts/dev/frames.py`` lists it."""

import sys

import pytest
import torch

MOST_FRAMES, MOST_FILES = 14, 9


@pytest.mark.mpi
def test_an_allreduce_passes_few_frames(mpi):
    x, passed = torch.ones(1), []

    def note(frame, event, _):
        module = frame.f_globals["__name__"]
        if event == "call" and module.startswith("torchmpi_py."):
            passed.append((module, frame.f_code.co_name))

    for _ in range(3):  # the first calls look things up that later ones find
        passed.clear()
        sys.setprofile(note)
        try:
            mpi.allreduce(x)
        finally:
            sys.setprofile(None)
    assert len(passed) <= MOST_FRAMES, passed
    assert len({module for module, _ in passed}) <= MOST_FILES, passed
