"""Hand the launcher's standard input to rank 0 itself, so that no more of it is taken than the program reads.

An MPI's starter reads ahead: it would empty the list of ``while read x; do torchmpirun ...; done < list``. Where all
ranks run on this host, rank 0 gets the descriptor through a socket in the job's folder, which only this user can enter.
It then shares the offset of a file with the caller, as under plain Python. A rank on another host cannot have the
descriptor; there the starter forwards what it reads.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

_NAME = "input"


@contextlib.contextmanager
def _address(folder: str | os.PathLike[str]) -> Iterator[str]:
    """The path of the socket in a short form: an address has 107 characters at most, and TMPDIR may be long."""
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{place}/{_NAME}"
    finally:
        os.close(place)


def offer(folder: str | os.PathLike[str]) -> None:
    """In the launcher: give descriptor 0 to the first process that asks for it."""
    listener = socket.socket(socket.AF_UNIX)
    with _address(folder) as address:
        listener.bind(address)
    listener.listen()
    threading.Thread(target=_give, args=(listener,), daemon=True).start()


def _give(listener: socket.socket) -> None:
    with contextlib.suppress(OSError), listener, listener.accept()[0] as connection:
        socket.send_fds(connection, [b"0"], [0])


def take(folder: str) -> None:
    """In rank 0: make the launcher's input this process's descriptor 0, where the launcher offers it."""
    if not os.path.exists(os.path.join(folder, _NAME)):
        return
    # Where a starter tells no ranks, each process takes itself for rank 0: the first one gets the input.
    with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection, _address(folder) as address:
        connection.connect(address)
        for taken in socket.recv_fds(connection, 1, 1)[1]:
            os.dup2(taken, 0)
            os.close(taken)
