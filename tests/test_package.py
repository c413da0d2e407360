"""The names of the package itself."""

import subprocess
import sys

import pytest

import torchmpi_py as mpi


@pytest.mark.parametrize(
    ("name", "here"),
    [("shutdown", "stop"), ("all_reduce", "allreduce"), ("allreduce_", "in place"), ("get_world_size", "size")],
)
def test_names_of_other_packages_are_explained(name, here):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; it is called .*{here}.* here"):
        getattr(mpi, name)


def test_what_other_names_stand_for_exists():
    for name, here in mpi._OTHER_NAMES.items():
        assert not hasattr(mpi, name)
        found = mpi
        for part in here.partition("(")[0].split("."):
            found = getattr(found, part)


def test_a_misspelt_name():
    done = subprocess.run([sys.executable, "-c", "import torchmpi_py as m; m.alreduce"], capture_output=True, text=True)
    assert "Did you mean: 'allreduce'?" in done.stderr


def test_only_public_names_are_listed():
    assert [name for name in dir(mpi) if not name.startswith("__")] == mpi.__all__
    assert "__version__" in dir(mpi)
