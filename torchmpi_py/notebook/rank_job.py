"""The kernel's side of a notebook's job: the launcher, and a connection to each rank.

The kernel listens until all ranks have connected. For ranks on this host it listens on a Unix socket, in a folder that
only this user can open. For ranks on other hosts it listens on the network interface that leads to these hosts. Both
sides prove that they have the key (see ``multiprocessing.connection``) before they read anything else. Each connection
has its own thread for the proof, so a silent connection does not delay the ranks. If too many connections have not
proved the key, the kernel closes the oldest one.

An interrupt of the kernel must not reach the launcher, so the launcher has its own process group. The launcher stays in
the kernel's session, so that it ends the ranks when the kernel dies.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import allocation, child_python, variables
from torchmpi_py.launch.options import parse

VARIABLE = variables.NOTEBOOK
_REFUSED = "elastic elastic_restart discover max_restarts groups layouts"
LAUNCHER = -1  # sender of the launcher's events, in place of a rank
_PROGRAM = child_python.command("torchmpi_py.notebook.rank_program")[1:]  # torchmpirun adds the Python executable.
_LOOK_SECONDS = 0.2
_ACCEPT_SECONDS = 0.05  # time between two checks for ranks that have proved the key
_HELLO_SECONDS = 20  # time for a connection to prove the key
_MOST_UNPROVED = 64  # maximum number of connections that have not proved the key

_END_SECONDS = 5.0  # time for the ranks to end on request
_KILL_SECONDS = 20.0  # time for the launcher to end the remaining ranks

_Outbox = queue.SimpleQueue["tuple[object, ...] | None"]


class RankProcess(NamedTuple):
    """The process and the host of a rank."""

    process_id: int
    host: str


class RankJob:
    """The ranks of a notebook. ``words`` are options of torchmpirun. Raises LaunchError if the ranks cannot start.

    ``events`` is a queue of messages (rank, (kind, ...)) from the ranks and the launcher. ``busy`` is the set of ranks
    that run a cell. ``num_called`` contains the number of collectives that each rank had called on each communicator at
    the end of its last cell.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.size = 0  # 0 until the first rank reports the size
        self.processes: dict[int, RankProcess] = {}
        self.busy: set[int] = set()
        self.num_called: dict[int, dict[object, int]] = {}
        self.events: queue.SimpleQueue[tuple[int, tuple[Any, ...]]] = queue.SimpleQueue()
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._outboxes: dict[int, _Outbox] = {}
        self._outgoing: queue.SimpleQueue[tuple[set[int], tuple[object, ...] | None]] = queue.SimpleQueue()
        key = secrets.token_bytes(32)
        with _listening(_address_for(words)) as (listener, where):
            self._launcher = subprocess.Popen(
                child_python.command("torchmpi_py.launch", *words, *_PROGRAM),
                env=os.environ | {VARIABLE: f"{where}:{key.hex()}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=_leave_group,
            )
            threading.Thread(target=self._read_launcher, daemon=True).start()
            threading.Thread(target=self._distribute, daemon=True).start()
            try:
                self._accept_ranks(listener, key)
            except BaseException:
                self.stop()
                raise
        for rank, connection in self._connections.items():
            threading.Thread(target=self._read_rank, args=(rank, connection), daemon=True).start()

    def _accept_ranks(self, listener: socket.socket, key: bytes) -> None:
        listener.settimeout(_ACCEPT_SECONDS)
        unproved: list[socket.socket] = []
        proved: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        while not self.size or len(self.processes) < self.size:
            try:
                unproved.append(listener.accept()[0])
            except TimeoutError:
                if self._launcher.poll() is not None:
                    raise LaunchError(f"the ranks did not start: {self.last_words()}") from None
            else:
                threading.Thread(target=_hear_proof, args=(unproved[-1], key, unproved, proved), daemon=True).start()
            with contextlib.suppress(IndexError, OSError):  # The connection's thread may have removed or closed it.
                if len(unproved) > _MOST_UNPROVED:
                    unproved.pop(0).shutdown(socket.SHUT_RDWR)
            while not proved.empty():
                connection, rank, self.size, *process = proved.get()
                self._connections[rank], self.processes[rank] = connection, RankProcess(*process)
                self._outboxes[rank] = outbox = _Outbox()
                threading.Thread(target=_write_to, args=(connection, outbox), daemon=True).start()

    def _read_rank(self, rank: int, connection: Connection[Any, Any]) -> None:
        """Queue the messages of a rank until the rank ends. This method runs in a thread."""
        try:
            with connection, contextlib.suppress(EOFError, OSError):
                while True:
                    self.events.put((rank, connection.recv()))
        finally:  # Report the end even if a message cannot be unpickled.
            self.events.put((rank, ("gone",)))

    def _read_launcher(self) -> None:
        """Queue the lines that the launcher writes, including output of MPI and C libraries on the ranks.

        This method runs in a thread.
        """
        assert self._launcher.stdout is not None
        with self._launcher.stdout as lines:
            for line in lines:
                self.events.put((LAUNCHER, ("line", line.decode(errors="replace"))))
        self.events.put((LAUNCHER, ("over",)))

    def send(self, ranks: set[int], kind: str, *content: object) -> None:
        """Queue a message to ranks. For a rank that has ended, the message is lost, but ``events`` contains "gone".

        Threads send the message, so an interrupt of the kernel can neither truncate the message nor skip some ranks.
        """
        self._outgoing.put((ranks, (kind, *content)))

    def _distribute(self) -> None:
        """Pass messages to the threads of their ranks, until a message is None. This method runs in a thread.

        Each rank has its own thread, so that a slow rank does not delay the others.
        """
        message: tuple[object, ...] | None = ()
        while message is not None:
            ranks, message = self._outgoing.get()
            for rank in ranks & self._outboxes.keys():
                self._outboxes[rank].put(message)

    def begin(self, ranks: set[int], kind: str, *content: object) -> None:
        """Send a task to ranks, and mark these ranks as busy."""
        self.busy |= ranks
        self.send(ranks, kind, *content)

    @property
    def ranks(self) -> set[int]:
        """The set of all ranks."""
        return set(range(self.size))

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended."""
        return self._launcher.poll() is not None

    def last_words(self, heed: Callable[..., None] = lambda *_: None) -> str:
        """Wait for the end of the launcher, and return its last lines, or a text with its exit code.

        ``heed`` is called with the arguments rank, kind, ... of each other event in the queue.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_KILL_SECONDS)
        text = ""
        with contextlib.suppress(queue.Empty):
            while (event := self.events.get(timeout=_LOOK_SECONDS)) != (LAUNCHER, ("over",)):
                rank, (kind, *content) = event
                if kind == "line":
                    text += content[0]
                else:
                    heed(rank, kind, *content)
        return text.strip() or f"torchmpirun ended with exit code {self._launcher.poll()}"

    def stop(self) -> None:
        """End the ranks: idle ranks on request, and busy ranks by a signal."""
        self.send(self.ranks, "end")
        self._outgoing.put((self.ranks, None))
        try:
            for seconds, end in (
                (_END_SECONDS * (self.size > 0), self._launcher.terminate),
                (_KILL_SECONDS, self._launcher.kill),
            ):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._launcher.wait(seconds)
                    return
                end()
            self._launcher.wait()
        except KeyboardInterrupt:
            self._launcher.terminate()  # The launcher ends the ranks even if the kernel does not wait.
            raise


@contextlib.contextmanager
def _listening(address: str) -> Iterator[tuple[socket.socket, str]]:
    """Yield a listening socket and its address. For ranks on this host, the address is a path private to this user."""
    if address != variables.LOOPBACK:
        with socket.create_server((address, 0)) as listener:
            yield listener, f"{address}:{listener.getsockname()[1]}"
        return
    with contextlib.ExitStack() as resources:
        try:
            path = os.path.join(resources.enter_context(tempfile.TemporaryDirectory(prefix="torchmpi_py-")), "kernel")
            listener = resources.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(path)
            listener.listen()
        except OSError as error:
            where = f"the temporary folder is {tempfile.gettempdir()}; set TMPDIR to /tmp or another short path"
            raise LaunchError(f"cannot create a socket for the ranks: {error}; {where}") from None
        yield listener, path


def connect(where: str, key: bytes) -> Connection[Any, Any]:
    """Connect a rank to the kernel that listens at ``where``. Both sides prove that they have the key."""
    host, _, port = where.rpartition(":")
    return Client(where if where.startswith("/") else (host, int(port)), authkey=key)


def _hear_proof(accepted: socket.socket, key: bytes, unproved: list[socket.socket], proved: Any) -> None:
    """Check the key of a new connection; put the connection and the rank's first message into ``proved``.

    This function runs in a thread.
    """
    connection: Connection[Any, Any] = Connection(os.dup(accepted.fileno()))
    with accepted:
        _limit(accepted, _HELLO_SECONDS)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            hello = connection.recv()
            unproved.remove(accepted)  # ValueError means that _accept_ranks has closed it.
        except (AuthenticationError, EOFError, OSError, ValueError):  # The peer may lack the key.
            connection.close()
            with contextlib.suppress(ValueError):
                unproved.remove(accepted)
            return
        _limit(accepted, 0)
    proved.put((connection, *hello))


def _write_to(connection: Connection[Any, Any], outbox: _Outbox) -> None:
    """Send the messages of the outbox until a message is None. This function runs in a thread."""
    while (message := outbox.get()) is not None:
        with contextlib.suppress(OSError, TypeError):  # A connection closed during send() raises TypeError.
            connection.send(message)


def _limit(connection: socket.socket, seconds: int) -> None:
    """Limit the time of each read and write of a connection; 0 means no limit."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _address_for(words: list[str]) -> str:
    """Return the address to listen on for the ranks that these options of torchmpirun start.

    Raise LaunchError for options that are not valid in a notebook.
    """
    try:
        options = parse([*words, *_PROGRAM])
    except SystemExit:
        raise LaunchError(f"%%torchmpi {' '.join(words)}: see the error above; pass options such as -n 4") from None
    if options.program != _PROGRAM:
        raise LaunchError(f"omit {options.program[0]!r}: the cell is the program, and %%torchmpi accepts only options")
    if invalid := [f"--{name.replace('_', '-')}" for name in _REFUSED.split() if getattr(options, name)]:
        raise LaunchError(f"in a notebook, omit {', '.join(invalid)}, which %%torchmpi does not support")
    placed = allocation.place(1, options.hosts, options.hostfile, os.environ)
    addresses = (_address_towards(host.name.rpartition("@")[2]) for host in placed.hosts)
    return next((address for address in addresses if not address.startswith("127.")), variables.LOOPBACK)


def _address_towards(host: str) -> str:
    """Return this host's address on the interface that leads to a host. Raise LaunchError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # This selects an interface, and sends nothing.
        except OSError as error:
            raise LaunchError(f"cannot reach host {host}: {error.strerror}; use another name or host") from None
        return str(probe.getsockname()[0])


def _leave_group() -> None:
    """Leave the kernel's process group, so that Ctrl-C in the kernel does not reach this process, the launcher."""
    os.setpgid(0, 0)
    for signum in (signal.SIGINT, signal.SIGHUP):  # Under nohup the kernel ignores these, and children inherit this.
        signal.signal(signum, signal.SIG_DFL)
