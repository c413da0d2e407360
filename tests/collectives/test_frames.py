"""The way of one small blocking call through the package is short: ``scripts/dev/frames.py`` lists it."""

import sys

import pytest
import torch

MOST_FRAMES, MOST_FILES = 12, 8


@pytest.mark.mpi
def test_an_allreduce_passes_few_frames(mpi):
    x, passed, calls = torch.ones(1), [], []

    def note(frame, event, _):
        module = frame.f_globals["__name__"]
        if event == "call" and module.startswith("torchmpi_py."):
            passed.append((module, frame.f_code.co_name))

    for _ in range(4):  # the first calls look things up; once in hundreds, records of operations under way are kept
        passed.clear()
        sys.setprofile(note)
        try:
            mpi.allreduce(x)
        finally:
            sys.setprofile(None)
        calls.append(list(passed))
    shortest = min(calls, key=len)
    assert len(shortest) <= MOST_FRAMES, shortest
    assert len({module for module, _ in shortest}) <= MOST_FILES, shortest
