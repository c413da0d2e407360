"""Hand torchmpirun's standard input directly to rank 0, so that only what the program reads is consumed.

mpirun reads ahead: it would empty the list of ``while read x; do torchmpirun ...; done < list``. If all ranks run on
this host, rank 0 gets the descriptor itself through a socket in the job's folder, which only this user can enter. Rank
0 then shares the offset of a file with torchmpirun's caller, as under plain Python. A descriptor cannot be sent to a
rank on another host; there mpirun forwards what it reads.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

_NAME = "input"


@contextlib.contextmanager
def _address(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a short path of the socket: an address has at most 107 characters, and TMPDIR may be long."""
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{place}/{_NAME}"
    finally:
        os.close(place)


def offer(folder: str | os.PathLike[str]) -> None:
    """Give descriptor 0 to the first process that asks for it; called in torchmpirun."""
    listener = socket.socket(socket.AF_UNIX)
    with _address(folder) as address:
        listener.bind(address)
    listener.listen()
    threading.Thread(target=_give, args=(listener,), daemon=True).start()


def _give(listener: socket.socket) -> None:
    with contextlib.suppress(OSError), listener, listener.accept()[0] as connection:
        socket.send_fds(connection, [b"0"], [0])


def take(folder: str) -> None:
    """Replace this process's descriptor 0 by torchmpirun's input, if it is offered; called in rank 0."""
    if not os.path.exists(os.path.join(folder, _NAME)):
        return
    # If mpirun sets no rank variables, each process takes itself for rank 0. The first one gets the input.
    with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection, _address(folder) as address:
        connection.connect(address)
        for descriptor in socket.recv_fds(connection, 1, 1)[1]:
            os.dup2(descriptor, 0)
            os.close(descriptor)
