"""``torchmpirun`` in odd surroundings: a job runs, or an error names what is odd and the remedy. Nothing hangs."""

import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from support import jobs

from torchmpi_py.launch import mpirun

pytestmark = [pytest.mark.timeout(240), jobs.needs_mpi]

PROGRAM = "from mpi4py import MPI; print('sum', MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1), flush=True)\n"
NEEDS_SHARED_MEMORY = bool(jobs.VENDOR) and mpirun.vendor_named(jobs.VENDOR).shared_bytes > 0
SHARED_MEMORY = "/dev/shm.*--shm-size|/dev/shm.*mount" if NEEDS_SHARED_MEMORY else ""
IN_A_NAMESPACE = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
HAS_NAMESPACES = not subprocess.run([*IN_A_NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True).returncode


def leave_no_folder():
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def limit_files(most):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, most))


# What is odd: variables (None: unset), a function of the child, a file system of its own, options. Where a job runs,
# several things are odd at once.
RUNS = {
    "no HOME, PATH is empty, TMPDIR is missing, the locale is C, stdin is closed": {
        "env": {"HOME": None, "PATH": "", "TMPDIR": "/nowhere"}
        | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        "program": "prögram.py",
        "before": lambda: os.close(0),
    },
    "HOME is missing, TMPDIR is read-only, the locale is unknown, a program's name is no UTF-8, stdout is closed": {
        "env": {"HOME": "/nowhere", "TMPDIR": "/proc", "LC_ALL": "xx_XX.ISO-8859-1"},
        "program": "p\udcff.py",
        "before": lambda: os.close(1),
    },
    "24 open files, which can be raised, no PATH, a hostfile in Latin-1, Slurm's number is odd": {
        "env": {"PATH": None, "SLURM_NTASKS": "²"},
        "hosts": b"localhost slots=2 # b\xf6se\n",
        "before": limit_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
    },
    "TMPDIR is full, stderr is closed": {
        "mounts": "mount -t tmpfs -o size=4k,nr_inodes=1 none /mnt",
        "env": {"TMPDIR": "/mnt"},
        "before": lambda: os.close(2),
    },
}
# And what an error says; "" if a job runs.
FAILS = {
    "the working folder is gone": ({"before": leave_no_folder}, "working folder.*change to "),
    "/dev/shm is full": ({"mounts": "mount -t tmpfs -o size=4k none /dev/shm"}, SHARED_MEMORY),
    "/dev/shm is read-only": ({"mounts": "mount -t tmpfs -o ro none /dev/shm"}, SHARED_MEMORY),
    "24 open files": ({"before": limit_files(24)}, "open files.*24.*ulimit -n"),
    "a host that is no UTF-8": ({"hosts": b"localh\xf6st slots=2\n"}, "hostfile:1.*write"),
    "a hostfile that is a FIFO": ({"hosts": os.mkfifo}, "hostfile.*named pipe"),
    "a hostfile that is a device": ({"options": ["--hostfile", "/dev/zero"]}, "/dev/zero.*device"),
    "a hostfile that is a folder": ({"options": ["--hostfile", "/"]}, "--hostfile /"),
    "a hostfile of a batch system that is a FIFO": ({"hosts": os.mkfifo, "by": "PBS_NODEFILE"}, "unset PBS_NODEFILE"),
    "control characters in a path": ({"options": ["--hostfile", "\x1b[2J\r\x9b"]}, r"--hostfile \\x1b\[2J\\x0d\\x9b:"),
    "slots without end": ({"hosts": b"localhost slots=99999999999999\n", "number": None}, "99999999999999 .*reduce"),
    "slots of very many lines": ({"hosts": b"localhost slots=60000\n" * 1000, "number": None}, "60000000 ranks"),
    "ranks without end": ({"number": "99999999999999"}, "99999999999999"),
    "a program that is a FIFO": ({"program": os.mkfifo}, "program.py is.*named pipe.*pass a"),
    "a program that is a device": ({"program": "/dev/zero"}, "/dev/zero.*device"),
}


@pytest.mark.parametrize("name", [*RUNS, *FAILS])
def test_a_job_in_odd_surroundings(name, tmp_path, monkeypatch):
    odd, error = FAILS.get(name) or (RUNS[name], "")
    monkeypatch.chdir(tmp_path)
    code, output = outcome(command_of(odd), environment_of(odd), odd.get("before"))
    if error:
        assert code == 2 or (code and name == "/dev/shm is full"), (code, output)  # full: a warning, then a rank dies
        assert re.search(error, output), output
        assert "Traceback" not in output
    else:
        assert (code, output.count("sum 3")) == (0, 0 if "stdout is closed" in name else 2), output


def environment_of(odd):
    environment = os.environ | odd.get("env", {}) | ({odd["by"]: "hostfile"} if "by" in odd else {})
    return {variable: value for variable, value in environment.items() if value is not None}


def command_of(odd):
    """The command, whose files are written into the working folder."""
    program, options = odd.get("program", "program.py"), list(odd.get("options", []))
    if callable(program):
        odd["program"](program := "program.py")
    elif not program.startswith("/"):
        Path(program).write_text(PROGRAM)
    if callable(odd.get("hosts")):
        odd["hosts"]("hostfile")
    elif "hosts" in odd:
        Path("hostfile").write_bytes(odd["hosts"])
    if "hosts" in odd and "by" not in odd:
        options += ["--hostfile", "hostfile"]
    if (number := odd.get("number", "2")) is not None:
        options += ["-n", number]
    command = [*jobs.TORCHMPIRUN, *options, os.path.abspath(program)]
    if mounts := odd.get("mounts"):
        if not HAS_NAMESPACES:
            pytest.skip("no namespaces of mounts")
        command = [*IN_A_NAMESPACE, mounts + ' && exec "$@"', "sh", *command]
    return command


def outcome(command, environment, before):
    """The exit code and what is printed; a hang is an error."""
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True, "timeout": 60}
    with open("output", "w+b") as output:
        code = subprocess.run(command, env=environment, stdout=output, preexec_fn=before, **streams).returncode
    return code, Path("output").read_text(errors="replace")
