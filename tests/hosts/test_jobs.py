"""Tests that run on ranks, on several hosts: those of this folder each way, and those of the other rooms."""

import jobs
import pytest
from testbed import ROOT

pytestmark = pytest.mark.timeout(1500)

WAYS = [jobs.Way(launcher, mpi) for mpi in ("openmpi", "mpich") for launcher in ("ssh", "slurm")]
LAYOUTS = {"1 + 1": (1, 1), "2 + 1": (2, 1), "2 + 2": (2, 2), "3 + 1": (3, 1), "1 + 1 + 1": (1, 1, 1)}
ROOMS = ["collectives", "engine", "nn", "paramserver", "torch_backend"]
# What these ask for is so on one node alone.
OF_ONE_NODE = ["engine/test_loaders.py::test_it_goes_on_in_the_middle_of_an_epoch"]


def run_on_hosts(bed, way, layout, *arguments, within_seconds=600):
    """pytest on every rank."""
    if reason := way.missing(bed):
        pytest.skip(reason)
    placed = dict(zip(bed.hosts, layout, strict=False))
    line = ["-m", "pytest", "--color=no", "-q", "-x", "--only-mpi", "-p", "no:cacheprovider", *arguments]
    environment = {"PYTEST_DEBUG_TEMPROOT": str(bed.shared)}
    ending = jobs.run(bed, way, placed, line, within_seconds=within_seconds, environment=environment)
    assert ending.code == 0, str(ending)
    assert " passed" in ending.output, str(ending)
    assert not ending.left, str(ending)
    return ending


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_across_hosts(bed, way, layout):
    run_on_hosts(bed, way, LAYOUTS[layout], str(ROOT / "tests" / "hosts" / "test_across_hosts.py"))


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_rooms(bed, mpi, room):
    """Every test that runs on ranks, of the rooms in which no test asks for one node."""
    left_out = [f"--deselect=tests/{name}" for name in OF_ONE_NODE if name.startswith(room)]
    run_on_hosts(bed, jobs.Way("ssh", mpi), (2, 1), str(ROOT / "tests" / room), *left_out, within_seconds=1400)
