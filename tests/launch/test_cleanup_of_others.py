"""What cleaning up leaves alone: processes and shared memory of other users and of other containers."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from torchmpi_py.launch import cleanup

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")


@contextlib.contextmanager
def sleeping(program, environment, *wrapper):
    """A process that runs ``program`` and then sleeps; the process id, once it has printed a line."""
    command = [*wrapper, sys.executable, "-c", f"import os, time\n{program}\nprint(1, flush=True)\ntime.sleep(100)"]
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE)
    try:
        if not process.stdout.readline():
            pytest.skip(f"{' '.join(wrapper)} is not allowed here")
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@needs_root
@pytest.mark.parametrize("whose", ["own", "of another user", "of another container"])
def test_processes(tmp_path, whose):
    remains = cleanup.Remains(tmp_path)
    name, value = remains.variable.split("=", 1)
    program = f"os.setuid({STRANGER})" if whose == "of another user" else ""
    wrapper = ("unshare", "--pid", "--fork", "--kill-child") if whose == "of another container" else ()
    with sleeping(program, {name: value}, *wrapper) as process_id:
        children = _children(process_id)
        found = remains.processes()
        assert (process_id in found) == (whose != "of another user")
        assert not set(children) & set(found)
        assert len(children) == (whose == "of another container")


def _children(process_id):
    with open(f"/proc/{process_id}/task/{process_id}/children") as file:
        return [int(number) for number in file.read().split()]


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_shared_memory_that_another_container_holds(monkeypatch, how):
    """As /proc shows it: no process of this container has the file."""
    monkeypatch.setattr(cleanup, "_processes", list)
    path = f"/dev/shm/mpich_shm_{os.getpid()}_{time.monotonic_ns()}"
    close = "os.close(file)" if how == "mapped" else ""
    program = f"""
import ctypes
file = os.open({path!r}, os.O_RDWR | os.O_CREAT, 0o600)
os.truncate(file, 4096)
libc = ctypes.CDLL(None)
libc.mmap(None, ctypes.c_size_t(4096), 3, 1, file, ctypes.c_long(0))
{close}"""
    try:
        with sleeping(program, {}):
            cleanup.remove_shared_memory({path})
            assert os.path.exists(path)
        cleanup.remove_shared_memory({path})
        assert not os.path.exists(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@needs_root
def test_shared_memory_of_another_user():
    path = f"/dev/shm/torch_{os.getpid()}_{time.monotonic_ns()}"
    with open(path, "w"):
        pass
    try:
        os.chown(path, STRANGER, -1)
        cleanup.remove_shared_memory({path})
        assert os.path.exists(path)
    finally:
        os.unlink(path)
