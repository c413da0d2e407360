"""Ranks that are there at once: a process that has imported torch forks them, which saves a second of each trial.

The MPI starts ``python -S nursery.py SOCKET program``, which hands its environment and its output over to the server
and stays, as the process that the MPI knows; the server forks a process with that environment, which runs the program.
It ends as its child did, by a signal or with a code; and when it is killed its child ends too, for their connection
closes. Good for trials in which no process is killed from outside: the MPI sees another process.
"""

import contextlib
import json
import os
import signal
import socket
import sys

_GONE = 250
_LOOK_SECONDS = 0.02


def be_born(path: str, program: list[str]) -> int:
    """In the process that the MPI has started: let the server make the rank, and end as it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        message = json.dumps({"environment": dict(os.environ), "program": program}).encode()
        descriptors = [1, 2] + ([int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else [])
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], descriptors)
        connection.sendall(message)
        answer = connection.recv(16)
    status = int(answer or str(_GONE << 8))
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    wanted, data = int.from_bytes(head, "big"), b""
    while len(data) < wanted:
        data += connection.recv(wanted - len(data))
    return json.loads(data), descriptors


def _live(connection: socket.socket) -> None:
    """In a forked process: be the rank."""
    import runpy
    import threading

    message, descriptors = _receive(connection)
    os.environ.clear()
    os.environ.update(message["environment"])
    for there, descriptor in zip((1, 2), descriptors, strict=False):
        os.dup2(descriptor, there)
    if descriptors[2:]:
        os.environ["PMI_FD"] = str(descriptors[2])

    def watch() -> None:
        connection.recv(1)  # nothing is ever sent: it closes
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    sys.argv = message["program"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def serve(path: str, modules: list[str]) -> None:
    """Fork a rank for each process that connects, with some more ``modules``, until the parent process is gone."""
    import importlib

    import torch

    from torchmpi_py.runtime import process

    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(module)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(64)
    listening.settimeout(_LOOK_SECONDS)
    print("ready", flush=True)
    living: dict[int, socket.socket] = {}
    while os.getppid() != 1:
        with contextlib.suppress(TimeoutError):
            connection, _ = listening.accept()
            process = os.fork()
            if process == 0:
                listening.close()
                return _live(connection)
            living[process] = connection
        while living and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with living.pop(ended[0]) as connection, contextlib.suppress(OSError):
                connection.sendall(str(ended[1]).encode())
    return None


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(be_born(sys.argv[1], sys.argv[2:]))
