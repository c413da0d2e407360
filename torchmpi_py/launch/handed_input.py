"""Hand torchmpirun's standard input directly to rank 0, so that only the input that the program reads is consumed.

mpirun would read all input. In ``while read x; do torchmpirun ...; done < list``, the first torchmpirun would then
consume the whole list. If all ranks run on this host, rank 0 gets the descriptor itself, through a socket in the job's
folder, which only this user can enter. If the input is a file, rank 0 then shares the file offset with torchmpirun's
caller, as under plain Python. A descriptor cannot be sent to a rank on another host. In this case mpirun forwards the
input.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

_NAME = "input"


@contextlib.contextmanager
def _address(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a short path of the socket, because an address has at most 107 characters, and TMPDIR may be long."""
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{place}/{_NAME}"
    finally:
        os.close(place)


def offer(folder: str | os.PathLike[str]) -> None:
    """Start a thread that sends descriptor 0 to the first process that connects. torchmpirun calls this function."""
    listener = socket.socket(socket.AF_UNIX)
    with _address(folder) as address:
        listener.bind(address)
    listener.listen()
    threading.Thread(target=_give, args=(listener,), daemon=True).start()


def _give(listener: socket.socket) -> None:
    with contextlib.suppress(OSError), listener, listener.accept()[0] as connection:
        socket.send_fds(connection, [b"0"], [0])


def take(folder: str) -> None:
    """Replace descriptor 0 of this process by torchmpirun's standard input, if torchmpirun offers it.

    Rank 0 calls this function. ``folder`` is the job's folder.
    """
    if not os.path.exists(os.path.join(folder, _NAME)):
        return
    # If mpirun sets no rank variables, every process behaves as rank 0. The first process gets the input.
    with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection, _address(folder) as address:
        connection.connect(address)
        for descriptor in socket.recv_fds(connection, 1, 1)[1]:
            os.dup2(descriptor, 0)
            os.close(descriptor)
