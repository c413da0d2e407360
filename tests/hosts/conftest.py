"""The bed that the tests of several hosts share."""

import contextlib
import os
import pathlib

import harness
import pytest
import testbed
from jobs import Way
from testbed import Bed
from trials import judge, pytest_terminal_summary  # noqa: F401

NUM_HOSTS = 3
DAILY = (  # the others take minutes
    "test_bed.py",
    "test_across_hosts[ssh openmpi-2 + 1]",
    "test_calls_that_differ_between_hosts[op-allreduce mpi torch.float32 max-torchmpirun]",
    "test_calls_that_differ_at_the_end[op-nodea:2,nodeb:1,nodec:1]",
    "test_a_host_that_cannot_be_reached",
)


def pytest_collection_modifyitems(items):
    for item in items:
        is_of_hosts = item.path.parent == pathlib.Path(__file__).parent and item.get_closest_marker("mpi") is None
        if is_of_hosts and not harness.ALL and not any(name in item.nodeid for name in DAILY):
            item.add_marker(pytest.mark.skip(reason="scripts/test_hosts runs it"))


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
