"""Fixtures for jobs: the file of a program, and a look for what a job has left behind."""

import os
import time

import pytest
from support import jobs

from torchmpi_py.launch import cleanup


@pytest.fixture
def program(tmp_path):
    """Write a program into a folder with a space in its name; return the path."""
    return lambda text: jobs.write(tmp_path / "a folder", text, "a program.py")


@pytest.fixture
def no_leftovers(monkeypatch, tmp_path):
    """Every process of the test's jobs has a mark; afterwards none lives, and the job's files are gone."""
    value = str(tmp_path)
    monkeypatch.setenv("LAUNCH_TEST", value)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    yield
    until = time.monotonic() + 60  # a process that was killed may not have had its turn
    while set(alive := cleanup.processes_with(f"LAUNCH_TEST={value}")) - {os.getpid()} and time.monotonic() < until:
        time.sleep(0.02)
    assert alive in ([], [os.getpid()])
    assert os.listdir(tmp_path / "t") == []
    lines = [line for path in tmp_path.glob("held-*") for line in path.read_text().splitlines()]
    held = {line.split(maxsplit=5)[5] for line in lines}
    assert not {name for name in held if os.path.exists(name)}
